"""The cache that is told what each block is worth: farthest next use, exact cases and what it can promise."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_pages_sglang.experiments.farthest import FullError, KeyedBlocks

NEVER = 1 << 20


def next_uses(requests):
    """For every block of every request the number of the next one that has it."""
    seen, found = {}, []
    for number in range(len(requests) - 1, -1, -1):
        found.append([seen.get(block, NEVER) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
    return found[::-1]


def hits(requests, num_blocks):
    """Hits of each request, served one after the other."""
    cache, found = KeyedBlocks(num_blocks), []
    for blocks, uses in zip(requests, next_uses(requests), strict=True):
        found.append(cache.start(blocks, [-use for use in uses]))
        cache.end(blocks)
    return found


def lru_hits(requests, num_blocks):
    """Of single blocks, by a dictionary that remembers the order of use."""
    cached, found = OrderedDict(), 0
    for (block,) in requests:
        found += block in cached
        cached[block] = None
        cached.move_to_end(block)
        if len(cached) > num_blocks:
            cached.popitem(last=False)
    return found


def most_hits(requests, num_blocks):
    """The most that any choice of evictions can have, of single blocks: tries all."""
    states = {frozenset(): 0}
    for (block,) in requests:
        after = {}
        for cached, so_far in states.items():
            grown = cached | {block}
            choices = [grown] if len(grown) <= num_blocks else [grown - {gone} for gone in cached - {block}]
            for choice in choices:
                after[choice] = max(after.get(choice, 0), so_far + (block in cached))
        states = after
    return max(states.values())


def test_the_block_whose_next_use_is_farthest_goes():
    assert hits([[1], [2], [3], [2], [1]], num_blocks=2) == [0, 0, 0, 1, 0]


def test_of_blocks_used_together_the_deepest_goes_first():
    # Both of the first prompt are used again at the end; one has to go for block 3.
    assert hits([[1, 2], [3], [1, 2]], num_blocks=2) == [0, 0, 1]


def test_a_prompt_in_use_does_not_go_for_another():
    cache = KeyedBlocks(3)
    cache.start([1, 2], [-NEVER, -NEVER])
    assert cache.start([3], [-1]) == 0
    with pytest.raises(FullError, match="the blocks in use leave no room in 3 for 1 more"):
        cache.start([4], [-1])


def test_what_was_in_use_can_go_afterwards():
    cache = KeyedBlocks(3)
    cache.start([1, 2], [-NEVER, -NEVER])
    cache.end([1, 2])
    cache.start([3, 4], [-5, -5])
    assert (cache.start([1], [-NEVER]), cache.num_evicted) == (1, 1)


def test_a_block_in_two_prompts_is_in_use_until_both_have_ended():
    cache = KeyedBlocks(2)
    cache.start([1], [-NEVER])
    cache.start([1], [-NEVER])
    cache.end([1])
    cache.start([2], [-1])
    with pytest.raises(FullError):
        cache.start([3], [-1])


def test_other_blocks_take_room_until_their_request_ends():
    cache = KeyedBlocks(4)
    cache.start([1], [-5])
    cache.end([1])
    cache.start([2], [-9], num_other=3)
    assert cache.num_evicted == 1
    cache.end([2], num_other=3)
    cache.start([3, 4, 5], [-7, -7, -7])
    assert cache.num_evicted == 1


SINGLE = st.lists(st.integers(0, 5).map(lambda block: [block]), min_size=1, max_size=14)


@given(SINGLE, st.integers(1, 4))
def test_of_single_blocks_no_choice_of_evictions_hits_more(requests, num_blocks):
    assert sum(hits(requests, num_blocks)) == most_hits(requests, num_blocks)


@given(st.lists(st.integers(0, 9).map(lambda block: [block]), max_size=80), st.integers(1, 6))
def test_of_single_blocks_lru_hits_no_more(requests, num_blocks):
    assert sum(hits(requests, num_blocks)) >= lru_hits(requests, num_blocks)


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=40)


@given(PATHS, st.integers(4, 12))
def test_no_block_stays_without_its_prefix(paths, num_blocks):
    ids = {}
    requests = [[ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))] for path in paths]
    parents = {ids[path]: ids.get(path[:-1]) for path in ids}
    cache = KeyedBlocks(num_blocks)
    for blocks, uses in zip(requests, next_uses(requests), strict=True):
        cache.start(blocks, [-use for use in uses])
        cache.end(blocks)
        assert len(cache) <= num_blocks
        assert all(parents[block] is None or parents[block] in cache for block in cache)
