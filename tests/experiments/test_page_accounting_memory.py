"""The page-accounting experiment's allocators, tree and model code on small examples."""

import numpy as np
import pytest
import torch

from radix_pages_sglang.experiments.page_accounting import allocators, chats, quality, strategies
from radix_pages_sglang.experiments.page_accounting.null import Shape
from radix_pages_sglang.experiments.page_accounting.slabs import Slabs
from radix_pages_sglang.experiments.page_accounting.strategies import Attention

TOKENS = 2048


def request(*kept):
    """One request that keeps `kept` tokens only."""
    flags = np.zeros((1, TOKENS), dtype=bool)
    flags[0, list(kept)] = True
    return flags


# --- allocators


def test_stocks_paged_pool_returns_pages_with_live_tokens_in_them():
    kept = np.ones((1, TOKENS), dtype=bool)
    kept[0, [5, 6, 40]] = False  # pages 0 and 2 lose a token or two
    outcome = allocators.paged_pool(kept)
    assert outcome.pages_freed.tolist() == [2]
    assert outcome.live_tokens_lost == 14 + 15


def test_evicting_again_in_the_same_page_frees_it_twice_in_stocks_pool():
    first = np.ones((1, TOKENS), dtype=bool)
    first[0, [5, 40]] = False
    second = first.copy()
    second[0, [6, 100]] = False  # one more token of page 0, and one of page 6
    assert allocators.pages_freed_twice(first, second) == 1


def test_stocks_token_pool_frees_every_slot_and_the_pages_that_are_wholly_free():
    kept = np.ones((1, TOKENS), dtype=bool)
    kept[0, 16:33] = False
    outcome = allocators.token_pool(kept)
    assert outcome.pages_freed.tolist() == [1]
    assert outcome.held_percent == pytest.approx(100 * (TOKENS - 17) / TOKENS)
    assert outcome.live_tokens_lost == 0


@pytest.mark.parametrize(("frame_pages", "freed"), [(1, 127), (4, 124), (64, 64), (128, 0)])
def test_ours_and_the_slabs_give_back_exactly_the_frames_without_a_kept_token(frame_pages, freed):
    kept = request(17)
    for outcome in (allocators.ours(kept, frame_pages, (1024, 1024)), allocators.slabs(kept, frame_pages)):
        assert outcome.pages_freed.tolist() == [freed]
        assert outcome.held_percent == pytest.approx(100 * (128 - freed) / 128)
        assert outcome.live_tokens_lost == 0


@pytest.mark.parametrize("frame_pages", [1, 4, 64, 128])
def test_the_system_counts_as_resident_what_the_ledger_says(frame_pages):
    kept = np.concatenate((request(17, 1000), request(*range(0, TOKENS, 64)), request()))
    outcome = allocators.ours(kept, frame_pages, allocators.BUFFER_ROWS["request"])
    assert outcome.os_off_frames == 0
    assert outcome.os_resident_percent == pytest.approx(outcome.held_percent)


def test_one_tensor_for_the_pool_returns_nothing_and_one_for_each_page_what_a_granule_allows():
    outcomes = {outcome.allocator: outcome for outcome in allocators.modelled(request(17), "request")}
    assert outcomes["cudaMallocAsync + trim, one pool"].pages_freed.tolist() == [0]
    assert outcomes["expandable segments, a page each"].pages_freed.tolist() == [124]
    assert outcomes["VMM granule, layer by layer"].pages_freed.tolist() == [0]
    assert outcomes["FasterTransformer"].held_percent == 100
    assert set(outcomes) == set(allocators.MODELLED)


def test_copying_the_kept_tokens_together_needs_just_the_frames_that_hold_them():
    kept = request(*range(0, TOKENS, 16))  # one token of every page: 128 tokens, 8 pages
    by_frame = {
        outcome.frame_pages: outcome.pages_freed.tolist()
        for outcome in allocators.modelled(kept, "head")
        if outcome.allocator == "copied together"
    }
    assert by_frame == {1: [120], 4: [120], 64: [64], 128: [0]}


def test_a_sample_is_spread_over_all_units():
    kept = np.arange(1000)[:, None] * np.ones((1, 4), dtype=int)
    found = allocators.sample(kept)
    assert len(found) == allocators.MOST_UNITS
    assert found[0, 0] == 0
    assert found[-1, 0] == 999


def test_slabs_fill_holes_before_they_grow_and_give_an_empty_slab_back():
    slabs = Slabs(4)
    first = slabs.take(8)
    assert slabs.give(first[[1, 2]]) == 0
    assert slabs.take(3).tolist() == [1, 2, 8]
    assert slabs.num_slabs == 3
    assert slabs.give(np.array([8])) == 1
    assert slabs.num_slabs == 2
    with pytest.raises(ValueError, match="twice"):
        slabs.give(np.array([8]))


# --- tree


def chat_texts(count):
    return [list(range(i * TOKENS, (i + 1) * TOKENS)) for i in range(count)]


@pytest.mark.parametrize("kept_tokens", [512, 819, 1228, 2048])
def test_our_tree_frees_exactly_the_pages_of_what_it_evicts(kept_tokens):
    kept = chats.evicted(chat_texts(3), kept_tokens, seed=0)
    assert kept.sum(axis=1).tolist() == [kept_tokens - kept_tokens % 16] * 3
    assert (16 * strategies.pages_empty(kept).sum(axis=1) == TOKENS - kept.sum(axis=1)).all()


def test_our_tree_evicts_branches_from_their_ends_and_the_prefix_last():
    kept = chats.evicted(chat_texts(1), 1024, seed=0)[0]
    assert kept[:1024].all()
    assert not kept[1024:].any()


@pytest.mark.parametrize("frame_pages", [1, 4, 64])
def test_moves_leave_no_more_frames_than_the_kept_pages_fill(frame_pages):
    outcome = chats.moved(chat_texts(3), 819, seed=0, frame_pages=frame_pages)
    kept_frames = -(-3 * (819 // 16) // frame_pages)
    assert outcome.pages_freed.sum() == pytest.approx(3 * 128 - kept_frames * frame_pages)


# --- model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama of random weights as a checkpoint, loaded for reading, and the same model with transformers' attention.

    The tokenizer is left out: nothing is encoded.
    """
    import transformers

    from radix_pages_sglang.experiments.page_accounting.reading import Reader

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.4,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: None)
        return Reader(folder), model


TEXT = [(7 * i * i + 3 * i) % 64 for i in range(48)]


def test_scores_are_the_sums_of_post_softmax_attention_that_transformers_computes(tiny):
    reader, model = tiny
    with torch.inference_mode():
        weights = model(torch.tensor([TEXT]), output_attentions=True).attentions
    expected = torch.stack([layer[0].sum(dim=1) for layer in weights]).numpy()
    found = reader.read(TEXT).attention()
    assert found == pytest.approx(expected, abs=1e-4)
    assert found.sum() == pytest.approx(2 * 4 * len(TEXT), rel=1e-5)


def test_a_continuation_with_everything_kept_is_the_model_itself(tiny):
    reader, model = tiny
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT])).logits[0]
    expected = [-float(torch.log_softmax(logits[i], -1)[TEXT[i + 1]]) for i in range(40, 47)]
    found = reader.losses(reader.read(TEXT[:40]), TEXT[40:], [np.ones((1, 1, 40), dtype=bool)])
    assert found[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_what_is_cut_is_not_seen_in_any_head_and_positions_stay(tiny):
    """The same as transformers with an additive mask over the cut tokens, whose queries come after them."""
    reader, model = tiny
    kept = np.zeros((1, 1, 40), dtype=bool)
    kept[..., [0, 1, 9, 30, 31, 39]] = True
    mask = torch.zeros(1, 1, 48, 48).masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -torch.inf)
    mask[..., 40:, :40].masked_fill_(~torch.from_numpy(kept[0, 0]), -torch.inf)
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT]), attention_mask=mask).logits[0]
    expected = [-float(torch.log_softmax(logits[i], -1)[TEXT[i + 1]]) for i in range(40, 47)]
    by_head = np.broadcast_to(kept, (2, 2, 40)).copy()
    prefix = reader.read(TEXT[:40])
    for variant in (kept, by_head):
        assert reader.losses(prefix, TEXT[40:], [variant])[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_heads_may_keep_different_tokens(tiny):
    reader, _ = tiny
    prefix = reader.read(TEXT[:40])
    alike = np.zeros((2, 2, 40), dtype=bool)
    alike[..., :8] = True
    other = alike.copy()
    other[1, 1] = False
    other[1, 1, 20:28] = True
    first, second = reader.losses(prefix, TEXT[40:], [alike, other])
    assert abs(first - second).max() > 1e-3


def test_the_mass_of_attention_to_everything_is_one_and_to_the_heaviest_tokens_most(tiny):
    reader, _ = tiny
    prefix = reader.read(TEXT[:32])
    future = reader.future(prefix, TEXT[32:])
    assert quality.attention_mass(future, np.ones((1, 1, 32), dtype=bool)) == pytest.approx(1)
    best = quality.attention_mass(future, strategies.most(future, 8))
    worst = quality.attention_mass(future, strategies.most(-future, 8))
    assert worst < 8 / 32 < best < 1


def test_the_budget_within_pages_is_the_largest_that_holds_no_more(tiny):
    rng = np.random.default_rng(0)
    text = Attention(rng.random((2, 4, 256), dtype=np.float32), 2, rng.random(256, dtype=np.float32))
    shape = Shape(tokens=256, layers=2, query_heads=4, kv_heads=2)
    for rule in quality.EQUAL_MEMORY:
        count = quality.tokens_within(rule, text, shape, 0.75)
        assert count is not None, rule.name
        choose = strategies.CHOOSERS[rule.choice]
        assert quality.held_pages(rule, choose(text, count), shape) <= 0.75
        assert quality.held_pages(rule, choose(text, count + 1), shape) > 0.75


def test_a_budget_that_no_number_of_tokens_meets_is_none(tiny):
    rng = np.random.default_rng(0)
    text = Attention(rng.random((2, 4, 256), dtype=np.float32), 2, rng.random(256, dtype=np.float32))
    shape = Shape(tokens=256, layers=2, query_heads=4, kv_heads=2)
    union = next(rule for rule in quality.EQUAL_MEMORY if rule.name == "h2o, union")
    assert quality.tokens_within(union, text, shape, 0.1) is None
