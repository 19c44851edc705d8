"""Hypothesis profiles: `dev` by default, `ci` where CI=true; HYPOTHESIS_PROFILE chooses one by name."""

import os

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("ci", max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev"))
