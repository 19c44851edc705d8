"""Talks to a running server through SGLang's own HTTP API: reads our state, sets our run-time settings ("knobs").

Needs the standard library alone, because the command line imports it before it knows the command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from radix_pages_sglang.knobs import FREE_FRAMES as FREE
from radix_pages_sglang.knobs import IDLE_TRIM_SECONDS as IDLE_TRIM
from radix_pages_sglang.knobs import MAX_CACHED_TOKENS as CACHED
from radix_pages_sglang.knobs import MAX_RESIDENT_BYTES as CEILING
from radix_pages_sglang.knobs import MODE, MODES, NO_BOUND, RETURNING, TRIM
from radix_pages_sglang.knobs import RESERVE_FRAMES as RESERVE
from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.sizes import format_size

State = dict[str, Any]
"""What one rank says under `radix_pages` in its entry of `/server_info` -> `internal_states`."""


class UnreachableError(CommandError):
    """Nobody answered at the server's address, or not in time; trying again later may help."""


@dataclass(frozen=True, slots=True)
class Client:
    """A server at `url`. SGLang guards reading by `api_key` and changes by `admin_api_key`, or by the other if a
    server has only one."""

    url: str
    api_key: str | None = None
    admin_api_key: str | None = None
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise CommandError(f"--url {self.url} needs http:// or https:// in front")

    def states(self) -> list[State]:
        """The state of every data-parallel rank. Raises CommandError unless all of them run this cache."""
        info = self._ask("/server_info")
        ranks = info.get("internal_states") if isinstance(info, dict) else None
        if not isinstance(ranks, list) or not ranks:
            raise CommandError(f"{self.url} answers, but not as an SGLang server: it has no internal_states")
        states = [rank.get("radix_pages") for rank in ranks]
        if not all(states):
            raise CommandError(
                f"the server at {self.url} does not run this cache: start it with --radix-cache-backend radix_pages"
            )
        for state in states:
            if "knobs" not in state:
                raise CommandError(
                    state.get("ledger_error")
                    or f"the server at {self.url} has no control: it runs SGLang's own cache or an older radix-pages"
                )
        return states

    def set(self, knob: str, value: float) -> list[State]:
        """Set `knob` on every rank and return the states from before. A value out of range is refused unsent.

        Raises CommandError for whatever is refused, here or there.
        """
        before = self.states()
        check_value(before, knob, value)
        answers = self._ask("/set_internal_state", {"server_args": {knob: value}})
        if not isinstance(answers, list) or not answers:
            raise CommandError(f"{self.url} answered {answers!r} to a change, not one true or false for each rank")
        refusing = [str(rank) for rank, accepted in enumerate(answers) if not accepted]
        if refusing:
            which = ", ".join(refusing)
            raise CommandError(f"the server refused {knob} = {value} (rank {which}); its log says why")
        return before

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What `path` answers to a GET, or to a POST of `body`, from JSON."""
        key = self.api_key if body is None else self.admin_api_key or self.api_key
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(
                Request(self.url.rstrip("/") + path, data, headers), timeout=self.timeout_seconds
            ) as response:
                return json.load(response)
        except HTTPError as error:
            raise self._refusal(error.code, path, key, changes=body is not None) from error
        except TimeoutError as error:
            raise UnreachableError(f"{self.url} did not answer within {self.timeout_seconds:.0f} s") from error
        except (OSError, IncompleteRead) as error:  # URLError, and a connection that breaks off
            raise UnreachableError(f"no server answers at {self.url}: {getattr(error, 'reason', error)}") from error
        except (ValueError, HTTPException) as error:  # no JSON, no HTTP, or an address that is none
            raise CommandError(f"{self.url} does not answer as an SGLang server: {error}") from error

    def _refusal(self, status: int, path: str, key: str | None, changes: bool) -> CommandError:
        if status in (401, 403):
            which = "admin key (or its API key, if it has no admin key)" if changes else "API key"
            option = "--admin-api-key or --api-key" if changes else "--api-key"
            problem = "does not accept this key" if key else "asks for a key"
            return CommandError(f"{self.url} {problem} ({status}): give the server's {which} with {option}")
        if status >= 500:
            return UnreachableError(f"{self.url} cannot answer now ({status} to {path}); its log says why")
        return CommandError(f"{self.url} answers {status} to {path}: is this an SGLang server?")


def check_value(states: list[State], knob: str, value: float) -> None:
    """Raise CommandError unless every rank has `knob` and allows `value`."""
    for state in states:
        if knob not in state["knobs"]:
            raise CommandError(missing(state, knob))
        if knob == TRIM and state["mode"] not in RETURNING:
            highest = state["highest_mode"]
            raise CommandError(f"in mode {state['mode']} nothing is returned: radix-pages ctl mode {highest} first")
        limits = state["knobs"][knob]
        if knob in (CACHED, CEILING) and value == NO_BOUND:
            continue
        if not limits["minimum"] <= value <= limits["maximum"]:
            is_lost = knob == MODE and state["degraded"]
            raise CommandError(missing(state, knob) if is_lost else out_of_range(knob, value, limits))


def missing(state: State, knob: str) -> str:
    """Why a server with this state does not have `knob`, and which setting brings it."""
    if state["degraded"]:
        return f"this server only observes until it is started again: {state['degraded']}"
    if knob in (MODE, CACHED):
        return f"this server does not offer {knob}"
    if knob == FREE and state["highest_mode"] == "return":
        return "this server does not move pages: start it with RADIX_PAGES_MODE=move"
    lacks = "has no backing" if state["backing"] == "none" else "only counts and places"
    return f"this server {lacks}: start it with RADIX_PAGES_MODE=return"


def out_of_range(knob: str, value: float, limits: Mapping[str, float]) -> str:
    """The refusal of `value`, naming the range as a person would type it."""
    least, most = limits["minimum"], limits["maximum"]
    if knob == MODE:
        return f"mode {described(knob, value)} is above the one this server started in, {described(knob, most)}"
    text = f"{described(knob, value)} is out of range: {described(knob, least)} to {described(knob, most)}"
    return f"{text}, or off" if knob in (CACHED, CEILING) else text


def in_force(state: State, knob: str) -> str:
    """The value of `knob` on a rank, for people; "-" where it has no such knob."""
    return described(knob, state["knobs"][knob]["value"]) if knob in state["knobs"] else "-"


def described(knob: str, value: float) -> str:
    """A value of `knob` with its unit; a size that had to be rounded is given in bytes, too."""
    if knob == MODE:
        return MODES[int(value)]
    if knob in (CACHED, CEILING) and value == NO_BOUND:
        return "off"
    if knob == CEILING and value >= 0:
        size = format_size(int(value))
        return f"{size} ({int(value)} bytes)" if "." in size else size
    if knob == IDLE_TRIM and value == 0:
        return "0 (never)"
    unit = {CACHED: " tokens", CEILING: " bytes", RESERVE: " frames", FREE: " frames", IDLE_TRIM: " seconds"}.get(
        knob, ""
    )
    return f"{value:,}{unit}"
