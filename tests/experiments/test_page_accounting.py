"""The page-accounting experiment without a model: nulls, choices, verdicts, texts, the command's answers."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from radix_pages_sglang.cli import app
from radix_pages_sglang.experiments.page_accounting import null, strategies, texts, verdict
from radix_pages_sglang.experiments.page_accounting.command import EXPECTED
from radix_pages_sglang.experiments.page_accounting.null import Null, Shape
from radix_pages_sglang.experiments.page_accounting.strategies import Attention
from radix_pages_sglang.serve import CommandError

TOKENS, PAGE = 256, 16


def attention(layers=2, heads=4, kv_heads=2, tokens=TOKENS, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((layers, heads, tokens), dtype=np.float32)
    return Attention(scores, kv_heads, rng.random(tokens, dtype=np.float32))


def every_set(null_):
    """All sets of kept tokens that the null allows, one after the other."""
    middle = range(null_.sinks, null_.tokens - null_.recent)
    for chosen in itertools.combinations(middle, null_.middle_kept):
        kept = np.zeros(null_.tokens, dtype=bool)
        kept[: null_.sinks] = True
        kept[null_.tokens - null_.recent :] = True
        kept[list(chosen)] = True
        yield kept


def empty_runs(kept, run):
    return int((~kept.reshape(-1, run).any(axis=1)).sum())


# --- the null


@pytest.mark.parametrize(("kept", "recent", "sinks", "run"), [(5, 2, 1, 2), (3, 0, 0, 4), (6, 3, 2, 2), (4, 4, 0, 4)])
def test_the_null_expects_what_all_possible_choices_free_on_average(kept, recent, sinks, run):
    small = Null(tokens=12, kept=kept, recent=recent, sinks=sinks)
    counts = [empty_runs(each, run) for each in every_set(small)]
    assert len(counts) == math.comb(small.middle, small.middle_kept)
    expected = small.runs(run) * small.empty_probability(run) if small.runs(run) else 0.0
    assert expected == pytest.approx(np.mean(counts), abs=1e-12)


def test_the_null_of_a_union_expects_what_all_pairs_of_choices_free_on_average():
    small = Null(tokens=8, kept=3, recent=1, sinks=0, sets=2)
    choices = list(every_set(small))
    counts = [empty_runs(one | other, 2) for one in choices for other in choices]
    assert small.runs(2) * small.empty_probability(2) == pytest.approx(np.mean(counts), abs=1e-12)


def test_the_null_and_its_deviation_agree_with_random_choices_of_full_size():
    whole = Null.matched(2048, 512)
    order = np.random.default_rng(1).random((2000, 2048), dtype=np.float32)
    kept = np.stack([strategies.matched_at_random(each, 512)[0, 0] for each in order])
    counts = strategies.pages_empty(kept).sum(axis=1)
    error = counts.std(ddof=1) / math.sqrt(len(counts))
    assert whole.expected_pages(1) == pytest.approx(counts.mean(), abs=4 * error)
    assert whole.deviation_pages(1) == pytest.approx(counts.std(ddof=1), rel=0.08)


def test_a_kept_middle_that_is_known_gives_the_same_expectation_when_it_is_what_was_planned():
    planned = Null.matched(2048, 819)
    kept = strategies.matched_at_random(np.random.default_rng(2).random(2048, dtype=np.float32), 819)[0]
    for frame_pages in null.FRAME_PAGES:
        expected = planned.expected_pages(frame_pages)
        assert planned.expected_given(frame_pages, kept) == pytest.approx([expected], rel=1e-9, abs=1e-15)


def test_the_published_chance_of_an_empty_page_is_the_uniform_null_of_a_long_text():
    """(1 - keep)^16 is the limit without a window: 4e-7 at 0.60, 1e-2 at 0.25."""
    assert Null.uniform(10**7, 6 * 10**6).empty_probability(16) == pytest.approx(0.4**16, rel=1e-3)
    assert Null.uniform(10**7, 25 * 10**5).empty_probability(16) == pytest.approx(0.75**16, rel=1e-3)


# --- prediction


def test_the_committed_prediction_is_what_the_formula_says():
    found = null.read_prediction(EXPECTED, Shape())
    assert found == null.by_key(null.prediction(Shape()))
    assert len(found) == (len(strategies.RULES) + 1) * len(null.CEILINGS) * len(null.FRAME_PAGES)


def test_what_is_certain_is_what_the_rule_frees():
    text = attention(tokens=2048)
    shape = Shape(layers=2, query_heads=4, kv_heads=2)
    certain = [rule for rule in strategies.RULES if rule.strategy in ("aligned", "streaming")]
    assert len(certain) == 3
    for rule, ceiling in itertools.product(certain, null.CEILINGS):
        count = null.kept_tokens(2048, ceiling)
        kept = strategies.units(strategies.CHOOSERS[rule.choice](text, count), rule.spans, 2, 2)
        freed = strategies.pages_empty(kept).sum(axis=1)
        assert set(freed.tolist()) == {null.certain_pages(rule, shape, count)}


def test_a_prediction_for_another_model_is_not_used(tmp_path):
    path = tmp_path / "expected.json"
    null.write_prediction(path, Shape(), {"commit": "abc", "seed": "0"})
    assert null.read_prediction(path, Shape(layers=16)) is None
    assert json.loads(path.read_text())["provenance"] == {"commit": "abc"}


def test_a_file_that_is_no_prediction_is_named(tmp_path):
    path = tmp_path / "expected.json"
    path.write_text("{}")
    with pytest.raises(CommandError, match=r"expected\.json is no prediction .*--predict expected\.json"):
        null.read_prediction(path, Shape())


# --- choices


@pytest.mark.parametrize("name", [name for name in strategies.CHOOSERS if not name.startswith("aligned")])
@pytest.mark.parametrize("count", [64, 101, 256])
def test_every_rule_keeps_exactly_its_budget_in_every_set(name, count):
    kept = strategies.CHOOSERS[name](attention(), count)
    assert set(kept.sum(axis=-1).ravel().tolist()) == {count}


@pytest.mark.parametrize("count", [64, 101, 256])
def test_aligned_windows_keep_whole_pages_within_the_budget_and_free_exactly_the_others(count):
    for name in ("aligned shared", "aligned per head"):
        kept = strategies.CHOOSERS[name](attention(), count)
        assert set(kept.sum(axis=-1).ravel().tolist()) == {count - count % PAGE}
        empty = strategies.pages_empty(kept)
        assert (PAGE * empty.sum(axis=-1) == TOKENS - kept.sum(axis=-1)).all()


def test_heavy_hitters_are_the_recent_half_and_the_best_of_the_rest():
    scores = np.array([[[1, 9, 2, 8, 3, 7, 4, 0]]], dtype=np.float32)
    kept = strategies.heavy_hitters(scores, 5)
    assert np.flatnonzero(kept).tolist() == [1, 3, 5, 6, 7]


def test_equal_scores_keep_the_first():
    kept = strategies.most(np.ones((1, 1, 6), dtype=np.float32), 2)
    assert np.flatnonzero(kept).tolist() == [0, 1]


def test_more_tokens_keep_what_fewer_kept():
    text = attention()
    for name, choose in strategies.CHOOSERS.items():
        steps = [choose(text, count) for count in range(6, TOKENS, 17)]
        assert all((less <= more).all() for less, more in itertools.pairwise(steps)), name


def test_a_shared_page_stays_when_any_head_of_any_layer_keeps_a_token_of_it():
    kept = np.zeros((2, 4, 32), dtype=bool)  # 2 layers, 4 query heads on 2 KV heads, 2 pages
    kept[0, 1, 3] = kept[1, 3, 20] = True
    by_span = {span: strategies.units(kept, span, 2, 2) for span in ("request", "layer", "head")}
    empty = {span: strategies.pages_empty(each).astype(int).tolist() for span, each in by_span.items()}
    assert empty == {
        "request": [[0, 0]],
        "layer": [[0, 1], [1, 0]],
        "head": [[0, 1], [1, 1], [1, 1], [1, 0]],
    }


def test_a_frame_is_empty_with_its_last_page():
    is_empty = np.array([[True, True, True, False]])
    assert strategies.in_empty_frames(is_empty, 2).tolist() == [[True, True, False, False]]


# --- verdicts


@pytest.mark.parametrize(
    ("counts", "expected", "said"),
    [
        ([0] * 20, 0.0, "zero"),
        ([0] * 20, 5.0, "zero"),
        ([0, 1] * 10, 0.5, "chance"),
        ([3, 4, 5] * 7, 1.0, "more than chance"),
        ([3, 4, 5] * 7, 8.0, "fewer than chance"),
        ([52] * 20, 52.0, "chance"),
        ([52] * 20, 0.01, "more than chance"),
        ([52] * 20, 52.1, "fewer than chance"),
        ([1] + [0] * 19, 1e-9, "chance"),
    ],
)
def test_a_verdict_follows_from_the_interval(counts, expected, said):
    assert verdict.verdict(counts, expected) == said


def test_the_interval_is_the_t_interval_and_not_negative():
    assert verdict.interval([1.0, 2.0, 3.0]) == pytest.approx((0.0, 2 + 4.30265 / math.sqrt(3)), rel=1e-5)
    assert verdict.mean_interval([1.0, 2.0, 3.0]).lower == pytest.approx(2 - 4.30265 / math.sqrt(3), rel=1e-5)


def test_one_text_says_nothing_about_others():
    assert verdict.interval([7.0]) == (0.0, math.inf)
    assert verdict.verdict([7.0], 1e6) == "chance"


# --- texts


def words(text):
    """Counts fewer tokens than any tokenizer of subwords would."""
    return re.findall(r"\w+|[^\w\s]", text)


def test_an_installation_has_more_than_twenty_long_texts_that_share_next_to_nothing():
    found = texts.choose(texts.packaged(), words, 24, 2177)
    assert len({text.name for text in found}) == 24
    assert {len(text.tokens) for text in found} == {2177}
    runs = [{text.tokens[i : i + 40] for i in range(2177 - 40)} for text in found]
    shared = sum(len(one & other) for one, other in itertools.combinations(runs, 2))
    assert shared < 0.005 * sum(len(one) for one in runs)


def test_help_topics_alone_are_eighteen_texts():
    assert len(texts.choose(texts._help_topics(), words, 18, 2177)) == 18


def test_short_documents_are_joined():
    documents = [texts.Prose(name, f"{name} " * 6) for name in "abcde"]
    found = texts.choose(documents, str.split, 2, 10)
    assert [text.name for text in found] == ["a + b", "c + d"]
    assert found[0].tokens == ("a",) * 6 + ("b",) * 4


def test_too_little_prose_is_said():
    with pytest.raises(CommandError, match="has documentation for 1 texts of 4 tokens, 3 were asked"):
        texts.choose([texts.Prose("a", "one two three four")], str.split, 3, 4)


def test_a_file_gives_as_many_texts_as_it_holds(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("a b c d e f g")
    found = texts.from_files([path], str.split, 3)
    assert [(text.name, text.tokens) for text in found] == [
        ("novel.txt from token 0", ("a", "b", "c")),
        ("novel.txt from token 3", ("d", "e", "f")),
    ]


# --- bad input


def refused(*arguments):
    done = CliRunner().invoke(app, ["experiment", "page-accounting", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_a_model_folder_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"--model {tmp_path} has no weights" in refused("--model", tmp_path)


def test_a_model_that_is_no_folder_or_has_no_config_is_named(tmp_path):
    assert "is no folder" in refused("--model", tmp_path / "nothing")
    assert "has no config.json" in refused("--model", tmp_path)


def test_a_length_that_frames_do_not_divide_is_refused():
    assert "--tokens 3000 is no multiple of 2,048" in refused("--tokens", 3000)


def test_a_text_that_is_too_short_or_no_text_is_named(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a b")
    with pytest.raises(CommandError, match=r"short.txt has 2 tokens, a text needs 3"):
        texts.from_files([path], str.split, 3)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommandError, match=r"short.txt cannot be read"):
        texts.from_files([path], str.split, 3)


def test_predict_writes_the_prediction_without_a_model(tmp_path):
    path = tmp_path / "expected.json"
    done = CliRunner().invoke(app, ["experiment", "page-accounting", "--predict", str(path)])
    assert done.exit_code == 0, done.output
    assert null.read_prediction(path, Shape()) == null.by_key(null.prediction(Shape()))
