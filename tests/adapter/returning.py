"""Caches whose memory is returned and had again, and what tests ask of them.

A frame here is two pages of four tokens; pools hold 124 tokens unless said otherwise: 16 frames, all of them whole.
`drawing` draws them: `#` a held page, `.` a free one, `--` a frame that was returned. The padding page is the first.
"""

from __future__ import annotations

from tests.adapter import caches
from tests.core.test_residency import drawing

FRAME = 4096
"""Bytes of a pretended frame."""


def returning(*, pool_tokens=124, pretended=True, **options):
    return caches.returning(pool_tokens=pool_tokens, pretended=pretended, **options)


def control_of(c):
    return c.tree.control


def residency(c):
    return c.allocator.residency


def frames(c):
    return drawing(residency(c))


def evicted(c):
    return c.tree.eviction_counts.evicted_tokens


def trimmed(c):
    """Frames that a trim returns now."""
    before = residency(c).counts.returned_frames_total
    control_of(c).trim()
    return residency(c).counts.returned_frames_total - before


def budget(c, **offsets):
    return c.allocator.create_prefill_budget(c.tree, **offsets)


def admits(found, num_tokens, chunk_limit=None, new_tokens=0):
    """SGLang's question about a prompt of `num_tokens`, as its adder asks it."""
    return found.check_prefill(
        extend_input_len=num_tokens,
        total_tokens=num_tokens + new_tokens + found.page_size,
        max_new_tokens=new_tokens,
        input_tokens=num_tokens,
        swa_host_hit_length=0,
        chunk_limit=chunk_limit,
    )


def assert_sound(c, total=124):
    """SGLang's sum is whole, nothing disagrees, and the system counts what we count. For idle caches."""
    assert c.sizes.total == total
    assert c.tree.recount() == []
    assert residency(c).overspent() == ""
    assert residency(c).committed_bytes == residency(c).backing.resident_bytes()
