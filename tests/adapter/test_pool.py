"""KV memory against the real operating system: what /proc says is resident, and what the tensors hold."""

from __future__ import annotations

import errno
import mmap
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from radix_pages.backing import CommitError
from radix_pages.ledger import Ledger
from radix_pages.placement import PLACEMENTS
from radix_pages.residency import Residency
from radix_pages.units import Geometry
from radix_pages_sglang import hooks, pool
from radix_pages_sglang.config import Settings, frame_geometry
from radix_pages_sglang.pool import GRANULE, Mapping, MmapBacking, create_buffers
from radix_pages_sglang.resident import process_resident_bytes, resident_bytes

MIB = 1024 * 1024


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


class Pool:
    """Buffers of several row widths over one mapping, and the frames that the settings make of them by default."""

    def __init__(self, row_bytes, page_size, num_pages):
        self.row_bytes = row_bytes
        self.geometry = frame_geometry(Settings(mode="return"), page_size, row_bytes, on_cuda=False, is_backed=True)
        slots = (num_pages + 1) * page_size
        self.num_frames = self.geometry.frame_of(num_pages) + 1
        self.mapping = Mapping([(width, slots) for width in row_bytes])
        self.backing = MmapBacking(self.mapping, self.geometry)
        self.tensors = [
            self.mapping.tensor(buffer, (slots, buffer.row_bytes), torch.uint8) for buffer in self.mapping.buffers
        ]

    def slots_of(self, page):
        first = self.geometry.first_slot(page)
        return slice(first, first + self.geometry.page_size)

    def write(self, page, seed):
        """Fill the slots of `page`, in every buffer, with bytes that `seed` makes."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            rows = tensor[self.slots_of(page)]
            rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator))

    def hashes(self, page):
        """Of each slot of `page`, over all buffers."""
        rows = torch.cat([tensor[self.slots_of(page)] for tensor in self.tensors], dim=1)
        return [zlib.crc32(row.tobytes()) for row in rows.numpy()]

    def frame_pages(self, frame):
        first, stop = self.geometry.first_page(frame), self.geometry.first_page(frame + 1)
        return range(first, min(stop, self.geometry.whole_pages(len(self.tensors[0]))))


def small(num_pages=64):
    """Frames of two pages of 16 slots: 4 KiB and 8 KiB of the two buffers."""
    found = Pool([128, 256], 16, num_pages)
    assert found.geometry.pages_per_frame == 2
    assert found.backing.frame_bytes == 12 * 1024
    return found


# one frame at a time


def test_nothing_is_resident_before_somebody_uses_it():
    assert small().backing.resident_bytes() == 0


def test_a_commit_makes_exactly_its_frames_resident_and_a_decommit_none_of_them():
    p = small()
    frame = p.backing.frame_bytes
    p.backing.commit(ids(0, 1, 2, 5))
    assert p.backing.resident_bytes() == p.backing.bytes_of(ids(0, 1, 2, 5)) == 4 * frame
    p.backing.decommit(ids(1, 5))
    assert p.backing.resident_bytes() == 2 * frame
    p.backing.decommit(ids(0, 2))
    assert p.backing.resident_bytes() == 0


def test_the_last_frame_takes_what_its_pages_need_and_no_neighbour_gets_any():
    """65 pages with the padding page: the last frame has one, 2 and 4 KiB of the buffers, rounded up to 4 KiB."""
    p = small()
    assert p.backing.bytes_of(ids(32)) == 8 * 1024
    assert p.backing.bytes_of(np.arange(33)) == p.mapping.size == 32 * p.backing.frame_bytes + 8 * 1024
    p.backing.commit(ids(32))
    assert p.backing.resident_bytes() == 8 * 1024
    p.write(64, seed=1)
    assert p.backing.resident_bytes() == 8 * 1024
    p.backing.commit(np.arange(32))
    assert p.backing.resident_bytes() == p.mapping.size
    p.backing.decommit(ids(32))
    assert p.backing.resident_bytes() == p.mapping.size - 8 * 1024


def test_giving_the_last_frame_back_leaves_the_beginning_of_the_next_buffer_alone():
    """A whole frame has 32 pages, the last one 21: in every buffer it ends before its bytes would."""
    p = Pool([256, 256, 192, 40], 16, 500)
    p.backing.commit(np.arange(16))
    p.write(1, seed=1)
    p.write(500, seed=2)
    kept = p.hashes(1)
    p.backing.decommit(ids(15))
    assert p.hashes(1) == kept
    assert p.backing.resident_bytes() == 15 * p.backing.frame_bytes
    p.backing.commit(ids(15))
    assert p.hashes(1) == kept
    assert p.backing.resident_bytes() == p.mapping.size


def test_reading_a_returned_frame_gives_zeros_and_makes_nothing_resident():
    p = small()
    p.backing.commit(ids(1, 2))
    for page in (2, 3, 4):
        p.write(page, seed=page)
    kept = p.hashes(4)
    p.backing.decommit(ids(1))
    before = p.backing.resident_bytes()
    assert all(not tensor[p.slots_of(page)].any() for tensor in p.tensors for page in (2, 3))
    assert p.backing.resident_bytes() == before == p.backing.frame_bytes
    assert p.hashes(4) == kept


def test_a_write_to_a_returned_frame_shows_in_what_is_resident():
    p = small()
    p.tensors[0][p.slots_of(6)] = 1
    assert p.backing.resident_bytes() == GRANULE


def test_memory_that_comes_back_is_new():
    p = small()
    p.backing.commit(ids(1))
    p.write(2, seed=0)
    p.backing.decommit(ids(1))
    p.backing.commit(ids(1))
    assert all(not tensor[p.slots_of(2)].any() for tensor in p.tensors)
    assert p.backing.resident_bytes() == p.backing.frame_bytes


def test_frames_that_do_not_fill_whole_pages_of_every_buffer_are_refused():
    with pytest.raises(ValueError, match="a frame takes 3072 bytes of a buffer, which are not whole pages of 4096"):
        MmapBacking(Mapping([(128, 64), (96, 64)]), Geometry(16, pages_per_frame=2))


# the mapping and its neighbours


def mapping_at(start, end):
    """What /proc/self/smaps says of the mapping [start, end), or None when there is none of just this extent."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{start:08x}-{end:08x} .*\n(?:[A-Z]\w+: .*\n)+", smaps, re.MULTILINE)
    return found and found[0]


def test_the_buffers_are_one_mapping_without_huge_pages_and_core_dumps():
    p = small()
    told = mapping_at(p.mapping.start, p.mapping.end)
    flags = re.search(r"^VmFlags: (.*)$", told, re.MULTILINE)[1].split()
    assert {"nh", "dd", "nr"} <= set(flags)


def test_neighbours_never_merge_into_it_whatever_their_flags():
    """Mappings of all sizes before and after, some advised just like the pool's, all of them resident."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pool._NORESERVE
    neighbours, pools = [], []
    for number in range(12):
        near = mmap.mmap(-1, (1 + number % 3) * MIB, flags=flags)
        if number % 2:
            near.madvise(mmap.MADV_DONTDUMP)
            near.madvise(mmap.MADV_NOHUGEPAGE)
        near[:] = b"x" * len(near)
        neighbours.append(near)
        if number % 4 == 1:
            pools.append(small(256 * number))
    for p in pools:
        assert mapping_at(p.mapping.start, p.mapping.end)
        assert p.backing.resident_bytes() == 0
    pools[0].backing.commit(ids(3))
    assert [p.backing.resident_bytes() for p in pools] == [pools[0].backing.frame_bytes, 0, 0]
    assert all(near[0:1] + near[-1:] == b"xx" for near in neighbours)


def test_tensors_outlive_the_mapping_and_it_goes_with_the_last_of_them():
    mapping = Mapping([(8, 4096), (16, 4096)])
    start, end = mapping.start, mapping.end
    tensor = mapping.tensor(mapping.buffers[1], (4096, 2), torch.int64)
    del mapping
    tensor.fill_(7)
    assert int(tensor.sum()) == 2 * 7 * 4096
    assert resident_bytes(start, end) == 16 * 4096
    del tensor
    assert mapping_at(start, end) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_a_buffer_is_an_ordinary_tensor_that_begins_on_a_page(dtype):
    mapping = Mapping([(6 * dtype.itemsize, 100)] * 3)
    tensors = [mapping.tensor(buffer, (100, 2, 3), dtype) for buffer in mapping.buffers]
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((100, 2, 3), dtype, "cpu")
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % GRANULE == 0
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert [set(tensor.view(-1).tolist()) for tensor in tensors] == [{1}, {2}, {3}]


# commits that go wrong, and kernels that cannot


class Advised:
    """A mapping's memory that notes what it is advised, fails to populate after so many times, and may keep all."""

    def __init__(self, memory, good=1 << 30, *, keeps=False):
        self._memory = memory
        self.good = good
        self.keeps = keeps
        self.calls = []

    def madvise(self, advice, start, size):
        self.calls.append((advice, start, size))
        if advice == pool._POPULATE_WRITE:
            self.good -= 1
            if self.good < 0:
                raise OSError(errno.ENOMEM, "pretended")
        if self.keeps and advice == mmap.MADV_DONTNEED:
            raise OSError(errno.EINVAL, "locked, says the test")
        self._memory.madvise(advice, start, size)

    def __setitem__(self, place, value):
        self._memory[place] = value


def test_neighbouring_frames_are_one_call_in_each_buffer():
    p = small()
    p.mapping.memory = Advised(p.mapping.memory)
    p.backing.commit(ids(1, 2, 3, 7))
    first, second = (buffer.offset for buffer in p.mapping.buffers)
    kib = 1024
    assert [(start, size) for _, start, size in p.mapping.memory.calls] == [
        (first + 4 * kib, 12 * kib),
        (first + 28 * kib, 4 * kib),
        (second + 8 * kib, 24 * kib),
        (second + 56 * kib, 8 * kib),
    ]


@pytest.mark.parametrize("good", [0, 1, 3])
def test_without_memory_a_commit_fails_whole_and_other_frames_keep_theirs(good):
    p = small()
    p.backing.commit(ids(0, 4))
    p.write(8, seed=3)
    kept = p.hashes(8)
    p.mapping.memory = Advised(p.mapping.memory, good)
    with pytest.raises(CommitError, match=r"3 frames could not be committed: .*pretended"):
        p.backing.commit(ids(1, 3, 5))
    assert p.backing.resident_bytes() == 2 * p.backing.frame_bytes
    assert p.hashes(8) == kept
    p.mapping.memory.good = 1 << 30
    p.backing.commit(ids(1, 3, 5))
    assert p.backing.resident_bytes() == 5 * p.backing.frame_bytes


def test_a_commit_that_fails_and_cannot_be_undone_has_failed_and_what_stays_is_counted():
    """The kernel refuses to take back memory that is locked."""
    p = small()
    p.backing.commit(ids(0))
    p.mapping.memory = Advised(p.mapping.memory, 1, keeps=True)
    with pytest.raises(CommitError, match=r"2 frames could not be committed: .*pretended"):
        p.backing.commit(ids(1, 3))
    assert p.backing.resident_bytes() > p.backing.frame_bytes


def test_a_kernel_that_cannot_populate_still_commits(monkeypatch, caplog):
    """An advice that no kernel knows ends as the old kernels' EINVAL; it is tried once."""
    monkeypatch.setattr(pool, "_POPULATE_WRITE", 9999)
    p = small()
    with caplog.at_level("INFO"):
        p.backing.commit(ids(0, 1, 2))
        p.backing.commit(ids(32))
    assert caplog.text.count("this kernel cannot commit memory ahead") == 1
    assert p.backing.resident_bytes() == 3 * p.backing.frame_bytes + 8 * 1024
    p.write(2, seed=0)
    p.backing.decommit(ids(1, 2, 32))
    assert p.backing.resident_bytes() == p.backing.frame_bytes


def test_a_kernel_without_huge_pages_is_served_and_other_refusals_are_not_hidden(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_NOHUGEPAGE", 9999)
    assert small().backing.resident_bytes() == 0
    monkeypatch.setattr(mmap, "MADV_DONTDUMP", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        small()


# from outside

HOLDER = """
import ctypes, mmap, sys
memory = mmap.mmap(-1, 64 * 4096)
memory.madvise(mmap.MADV_DONTDUMP, 4096, 62 * 4096)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 4096
print(start, flush=True)
for line in sys.stdin:
    advice, first, pages = line.split()
    if advice == "write":
        for page in range(int(first), int(first) + int(pages)):
            memory[(1 + page) * 4096] = 1
    else:
        memory.madvise(mmap.MADV_DONTNEED, (1 + int(first)) * 4096, int(pages) * 4096)
    print("done", flush=True)
"""


def test_the_memory_of_another_process_is_read_from_outside():
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with holder:
        start = int(holder.stdout.readline())

        def resident(line):
            holder.stdin.write(f"{line}\n")
            assert holder.stdout.readline() == "done\n"
            return resident_bytes(start, start + 62 * 4096, holder.pid)

        assert resident_bytes(start, start + 62 * 4096, holder.pid) == 0
        assert resident("write 0 40") == 40 * 4096
        assert process_resident_bytes(holder.pid) >= 40 * 4096
        assert resident("give 10 20") == 20 * 4096
        assert resident_bytes(start, start + 62 * 4096) == 0  # not this process's
        holder.stdin.close()
    with pytest.raises(FileNotFoundError):
        resident_bytes(start, start + 62 * 4096, holder.pid)


# SGLang's pool


def kv_pool(**options):
    plain = {"size": 256, "page_size": 16, "dtype": torch.float16, "head_num": 2, "head_dim": 16, "layer_num": 3}
    return MHATokenToKVPool(**{**plain, **options}, device="cpu", enable_memory_saver=False)


@pytest.mark.parametrize("options", [{}, {"v_head_dim": 8}, {"dtype": torch.float32}, {"page_size": 1}])
def test_sglangs_pool_gets_buffers_of_the_shapes_that_it_makes_itself(options):
    kv = kv_pool(**options)
    stock = [(t.shape, t.dtype, t.stride()) for t in (*kv.k_buffer, *kv.v_buffer)]
    rows = hooks.row_bytes(kv)
    mapping = create_buffers(kv)
    assert [(t.shape, t.dtype, t.stride()) for t in (*kv.k_buffer, *kv.v_buffer)] == stock
    assert sorted(buffer.row_bytes for buffer in mapping.buffers) == sorted(rows) == sorted(hooks.row_bytes(kv))
    assert all(mapping.start <= t.data_ptr() < mapping.end for t in (*kv.k_buffer, *kv.v_buffer))
    assert resident_bytes(mapping.start, mapping.end) == 0


def test_keys_and_values_of_all_layers_keep_apart():
    kv = kv_pool()
    create_buffers(kv)
    for layer in range(3):
        kv.get_key_buffer(layer).fill_(layer + 1)
        kv.get_value_buffer(layer).fill_(-layer - 1)
    for layer in range(3):
        assert set(kv.get_key_buffer(layer).view(-1).tolist()) == {layer + 1}
        assert set(kv.get_value_buffer(layer).view(-1).tolist()) == {-layer - 1}


# whatever happens in a row


class MemoryAgainstTheSystem(RuleBasedStateMachine):
    """Pages are written as soon as they are taken; `kept` are the hashes of their slots."""

    row_bytes, page_size, num_pages = [256, 256, 192, 40], 16, 500

    @initialize(placement=st.sampled_from(sorted(PLACEMENTS)), reserve=st.integers(0, 2))
    def start(self, placement, reserve):
        self.neighbours = [self.neighbour()]
        self.pool = Pool(self.row_bytes, self.page_size, self.num_pages)
        self.neighbours.append(self.neighbour())
        ledger = Ledger(self.pool.geometry, self.num_pages)
        self.residency = Residency(PLACEMENTS[placement](ledger), self.pool.backing, reserve_frames=reserve)
        self.residency.start_returned()
        self.kept = {}
        self.seed = 0
        self.changed = True

    def neighbour(self):
        memory = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pool._NORESERVE)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(mmap.MADV_DONTDUMP)
        memory[:] = b"n" * MIB
        return memory

    @rule(num_pages=st.integers(1, 90))
    def take_and_write(self, num_pages):
        placement = self.residency.placement
        if num_pages > placement.num_free:
            self.residency.grow(num_pages - placement.num_free)
        pages = placement.take(min(num_pages, placement.num_free)).tolist()
        for page in pages:
            self.seed += 1
            self.pool.write(page, self.seed)
            self.kept[page] = self.pool.hashes(page)
        self.changed = True

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def give(self, data):
        """Either end of what is held, or some of it from all over."""
        pages = sorted(self.kept)
        count = data.draw(st.integers(1, len(pages)))
        chosen = data.draw(st.sampled_from([pages[:count], pages[-count:], pages[:: len(pages) // count]]))
        self.residency.placement.give(np.array(chosen))
        for page in chosen:
            del self.kept[page]

    @rule()
    def trim(self):
        self.residency.trim()
        self.changed = True

    @rule(keep=st.integers(0, 12))
    def trim_to(self, keep):
        self.residency.trim(keep_committed=keep)
        self.changed = True

    @rule(num_pages=st.integers(1, 200))
    def grow(self, num_pages):
        self.residency.grow(num_pages)
        self.changed = True

    @rule()
    def refill_reserve(self):
        self.residency.refill_reserve()
        self.changed = True

    @rule()
    def read_what_was_returned(self):
        ledger = self.residency.ledger
        for frame in np.flatnonzero(ledger.is_returned).tolist():
            for page in self.pool.frame_pages(frame):
                assert not any(tensor[self.pool.slots_of(page)].any() for tensor in self.pool.tensors)
        self.changed = True

    @precondition(lambda self: len(self.neighbours) < 5)
    @rule()
    def somebody_else_maps_memory(self):
        self.neighbours.append(self.neighbour())
        self.changed = True

    @invariant()
    def exactly_the_committed_frames_are_resident(self):
        if not hasattr(self, "residency") or not self.changed:
            return
        self.changed = False
        residency = self.residency
        committed = np.flatnonzero(~residency.ledger.is_returned)
        assert residency.disagreements() == []
        assert residency.committed_bytes == self.pool.backing.bytes_of(committed)
        assert self.pool.backing.resident_bytes() == residency.committed_bytes

    @invariant()
    def kept_pages_hold_what_was_written(self):
        if hasattr(self, "residency"):
            assert {page: self.pool.hashes(page) for page in self.kept} == self.kept


@pytest.mark.parametrize(
    ("row_bytes", "page_size", "num_pages", "frames"),
    [
        pytest.param([256, 256, 192, 40], 16, 500, 16, id="frames of 32 pages, the last one cut off"),
        pytest.param([512] * 4, 16, 150, 151, id="frames of a page"),
        pytest.param([320, 64], 1, 8191, 128, id="frames of 64 single slots"),
    ],
)
def test_ledger_placement_and_system_agree_after_every_step(row_bytes, page_size, num_pages, frames):
    assert Pool(row_bytes, page_size, num_pages).num_frames == frames
    members = {"row_bytes": row_bytes, "page_size": page_size, "num_pages": num_pages}
    few = settings(max_examples=settings.default.max_examples // 10, stateful_step_count=15)
    run_state_machine_as_test(type("MemoryAgainstTheSystem", (MemoryAgainstTheSystem,), members), settings=few)
