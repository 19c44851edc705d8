"""Owners, bounds and the system's accounts under whatever happens in a row (`returning.py`)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from radix_pages_sglang.config import MODES
from radix_pages_sglang.knobs import (
    MAX_CACHED_TOKENS,
    MAX_RESIDENT_BYTES,
    MODE,
    NO_BOUND,
    RESERVE_FRAMES,
)
from tests.adapter import caches
from tests.adapter.returning import admits
from tests.adapter.test_allocator_stateful import POOL_PAGES, ROWS, Ownership

pytestmark = pytest.mark.usefixtures("published_config")

OBSERVE, PLACE, RETURN = (MODES.index(mode) for mode in ("observe", "place", "return"))


class Bounded(Ownership):
    """Owners, sums and KV as in any pool, while frames come and go: by the system's accounts or by pretended ones."""

    pretended = True

    @initialize(reserve=st.integers(0, 1), cap=st.none() | st.integers(0, 40))
    def start(self, reserve, cap) -> None:
        self.num_pages = POOL_PAGES[self.page_size]
        self.cache = caches.returning(
            page_size=self.page_size,
            frame_pages=self.frame_pages,
            pool_tokens=self.num_pages * self.page_size,
            pretended=self.pretended,
            placement=self.placement,
            rows=ROWS,
            reserve_frames=reserve,
            max_cached_tokens=cap,
        )
        self.live = []
        self.changed = True
        self.committed_before = self.residency.committed_frames

    @property
    def residency(self):
        return self.cache.allocator.residency

    @property
    def control(self):
        return self.cache.tree.control

    @property
    def is_without_memory(self) -> bool:
        """Whether the next allocation gets no frame committed."""
        return bool(self.residency._skip) or (self.pretended and self.residency.backing.failing_next > 0)

    def expecting(self, num_pages: int):
        """As for any pool, of which a part may be out of reach now: room is committed first and then evicted."""
        allocator = self.cache.allocator
        out_of_reach = allocator.withheld_size()
        if self.is_without_memory:
            out_of_reach = allocator.available_size() - allocator.committed_size()
        free = (allocator.available_size() - out_of_reach) // self.page_size
        missing = max(num_pages - free, 0)
        self.evicted_before = self.cache.tree.eviction_counts.evicted_tokens
        self.changed = True
        return missing <= self.cache.sizes.evictable // self.page_size, missing * self.page_size

    # -- what the control does --

    def set(self, name, value) -> None:
        knob = self.control.knobs()[name]
        if knob.complaint(name, value) == "":
            self.control.set(name, value)
            self.changed = True

    @rule()
    def step(self) -> None:
        self.control.step()
        cap = self.control.max_cached_tokens
        assert cap is None or self.cache.sizes.evictable <= cap
        assert not self.residency.over_ceiling_frames or not self.cache.sizes.evictable
        self.changed = True

    @rule()
    def trim(self) -> None:
        self.control.trim()
        assert self.control.degraded == ""
        self.changed = True

    @rule(frames=st.none() | st.integers(2, 16))
    def set_ceiling(self, frames) -> None:
        self.set(MAX_RESIDENT_BYTES, NO_BOUND if frames is None else frames * self.residency.backing.frame_bytes)

    @rule(reserve=st.integers(0, 3))
    def set_reserve(self, reserve) -> None:
        self.set(RESERVE_FRAMES, reserve)

    @rule(cap=st.sampled_from([NO_BOUND, 0, 8, 24]))
    def set_cap(self, cap) -> None:
        self.set(MAX_CACHED_TOKENS, cap)

    @rule(mode=st.sampled_from([OBSERVE, PLACE, RETURN, RETURN]))
    def set_mode(self, mode) -> None:
        self.set(MODE, mode)

    @precondition(lambda self: self.pretended)
    @rule(commits=st.sampled_from([0, 1, 1, 2, 1000]))
    def commits_fail(self, commits) -> None:
        self.residency.backing.fail_next(commits)

    @rule(num_tokens=st.integers(1, 60))
    def admission_keeps_its_word(self, num_tokens) -> None:
        """Who is admitted can be allocated for, whatever has to be evicted."""
        allocator = self.cache.allocator
        self.changed = True
        if not admits(allocator.create_prefill_budget(self.cache.tree), num_tokens)[0]:
            return
        room = self.cache.room_for(num_tokens)
        allocator.evict_to_free_tokens(self.cache.tree, room)
        slots = allocator.alloc(room)
        assert slots is not None
        allocator.free_segment(slots, start_pos=0)

    # -- what must hold after every step --

    @invariant()
    def committed_frames_and_the_system_agree(self) -> None:
        if not hasattr(self, "cache") or not self.changed:
            return
        self.changed = False
        assert self.residency.disagreements() == []
        assert self.residency.backing.resident_bytes() == self.residency.committed_bytes
        most, committed = self.residency.max_frames, self.residency.committed_frames
        assert most is None or committed <= max(most, self.committed_before)  # a step takes back what is too much
        self.committed_before = committed


@pytest.mark.parametrize("placement", [None, "stock"])
@pytest.mark.parametrize(("page_size", "frame_pages"), [(1, 4), (4, 2)])
def test_owners_and_bounds_are_kept_whatever_fails(page_size, frame_pages, placement):
    choice = {"page_size": page_size, "frame_pages": frame_pages, "placement": placement}
    few = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=50)
    run_state_machine_as_test(type("Bounded", (Bounded,), choice), settings=few)


@pytest.mark.parametrize(("page_size", "frame_pages"), [(1, 4), (4, 2)])
def test_kept_kv_is_kept_and_the_system_counts_what_we_count(page_size, frame_pages):
    choice = {"page_size": page_size, "frame_pages": frame_pages, "placement": None, "pretended": False}
    few = settings(max_examples=settings.default.max_examples // 10, stateful_step_count=25)
    run_state_machine_as_test(type("BoundedBySystem", (Bounded,), choice), settings=few)
