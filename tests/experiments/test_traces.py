"""Reading request traces: three formats, what is refused with file and line, and what is passed over."""

import json
import tracemalloc

import pytest

from radix_pages_sglang.experiments.traces import TraceRequest, open_trace
from radix_pages_sglang.serve import CommandError

MOONCAKE = {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.5,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [5, 6, 7],
}


@pytest.fixture
def trace_of(tmp_path):
    """Write lines, given as text or as objects, into a file and open that."""

    def write(*lines, **options):
        path = tmp_path / "trace.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts))
        return open_trace(path, **options)

    return write


def refusal(call):
    with pytest.raises(CommandError) as caught:
        call()
    return str(caught.value)


# -- formats --


def test_a_mooncake_trace_keeps_its_ids_and_counts_milliseconds_from_the_first_request(trace_of):
    trace = trace_of(MOONCAKE, {**MOONCAKE, "timestamp": 4500, "hash_ids": [0, 9]})
    assert (trace.format, trace.block_tokens) == ("Mooncake", 512)
    assert list(trace) == [TraceRequest(0.0, 1100, 7, (0, 1, 2)), TraceRequest(1.5, 1100, 7, (0, 9))]


def test_a_qwen_bailian_trace_counts_seconds_and_has_blocks_of_16_tokens(trace_of):
    trace = trace_of(BAILIAN, {**BAILIAN, "timestamp": 63.0})
    assert (trace.format, trace.block_tokens) == ("Qwen-Bailian", 16)
    assert [(one.seconds, one.input_tokens, one.output_tokens, len(one.blocks)) for one in trace] == [
        (0.0, 40, 9, 3),
        (1.5, 40, 9, 3),
    ]


def test_equal_bailian_ids_are_one_block_only_after_the_same_prefix(trace_of):
    one, same_start, elsewhere = (
        request.blocks
        for request in trace_of(*({**BAILIAN, "hash_ids": ids} for ids in ([5, 6, 5], [5, 6, 8], [6, 5])))
    )
    assert one[:2] == same_start[:2]
    assert len({*one, *same_start, *elsewhere}) == 6


def test_tokens_are_cut_into_blocks_that_stand_for_their_prefix(trace_of):
    trace = trace_of({"tokens": [1, 2, 3, 4, 5]}, {"tokens": [1, 2, 3, 4, 6]}, {"tokens": [3, 4]}, block_tokens=2)
    one, other, middle = trace
    assert (trace.format, one.input_tokens, one.output_tokens, one.seconds) == ("tokens", 5, 0, 0.0)
    assert one.blocks[:2] == other.blocks[:2]
    assert len({*one.blocks, *other.blocks, *middle.blocks}) == 5


def test_a_token_trace_may_say_when_requests_come_and_how_long_answers_are(trace_of):
    first, second = trace_of(
        {"tokens": [1] * 17, "timestamp": 10.0, "output_length": 3}, {"tokens": [1], "timestamp": 12.5}
    )
    assert (first.output_tokens, second.seconds, len(first.blocks)) == (3, 2.5, 2)


def test_a_trace_can_be_read_again_and_blank_lines_are_no_requests(trace_of):
    trace = trace_of("", MOONCAKE, "  ", MOONCAKE)
    assert list(trace) == list(trace)
    assert len(list(trace)) == 2


def test_a_long_trace_is_never_in_memory_as_a_whole(trace_of, tmp_path):
    trace = trace_of(*[MOONCAKE] * 20_000)
    tracemalloc.start()
    for _ in trace:
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < trace.path.stat().st_size / 4


# -- what is refused --

BAD_LINES = {
    "{": "it is not JSON (Expecting property name enclosed in double quotes at column 2)",
    "[1]": "it is a JSON list, not an object",
    '{"timestamp": 1}': "it is not of the format of the lines before it, Mooncake",
    '{"tokens": [1]}': "it is not of the format of the lines before it, Mooncake",
    json.dumps({**MOONCAKE, "timestamp": "soon"}): "its timestamp is 'soon', not a number",
    json.dumps({**MOONCAKE, "timestamp": float("nan")}): "its timestamp is nan, not a number",
    json.dumps({**MOONCAKE, "output_length": -1}): "its output_length is -1, not a whole number from 0",
    json.dumps({**MOONCAKE, "input_length": True}): "its input_length is True, not a whole number from 0",
    json.dumps({**MOONCAKE, "hash_ids": "0"}): "its hash_ids is '0', not a list",
    json.dumps({**MOONCAKE, "hash_ids": [0, 1.5]}): "its hash_ids hold 1.5, which is not an integer of 64 bits",
    json.dumps({**MOONCAKE, "hash_ids": [2**64]}): (
        "its hash_ids hold 18446744073709551616, which is not an integer of 64 bits"
    ),
    '{"hash_ids": [0], "timestamp": 0, "input_length": 1}': "it has no output_length",
    '{"hash_ids": [0], "timestamp": ' + "9" * 5000 + "}": "it is not JSON (ValueError)",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_a_bad_line_is_told_with_file_line_and_reason(trace_of, line):
    trace = trace_of(MOONCAKE, line)
    hint = "correct it, or pass over such lines with --skip-bad"
    assert refusal(lambda: list(trace)) == f"{trace.path}, line 2: {BAD_LINES[line]}; {hint}"


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_bad_lines_can_be_passed_over_and_are_counted_anew_each_time(trace_of, line):
    trace = trace_of(MOONCAKE, line, {**MOONCAKE, "timestamp": 4500}, line, skip_bad=True)
    for _ in range(2):
        assert [request.seconds for request in trace] == [0.0, 1.5]
        assert trace.skipped == 2


def test_a_bad_first_line_can_be_passed_over(trace_of):
    trace = trace_of("{", '{"prompt": "hello"}', MOONCAKE, skip_bad=True)
    assert (trace.format, len(list(trace)), trace.skipped) == ("Mooncake", 1, 2)


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(MOONCAKE).encode() + b'\n{"timestamp": "\xff"}\n')
    assert "line 2: it is not JSON (UnicodeDecodeError)" in refusal(lambda: list(open_trace(path)))


def test_an_unknown_format_is_refused_and_the_known_ones_are_named(trace_of):
    told = refusal(lambda: trace_of({"prompt": "hello"}))
    assert "line 1: its fields are those of no known trace" in told
    assert all(word in told for word in ("Mooncake", "Qwen-Bailian", "tokens"))


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_an_empty_trace_is_refused(trace_of, lines):
    assert " is empty: give " in refusal(lambda: trace_of(*lines))


def test_a_trace_without_one_good_line_is_refused_even_if_bad_ones_are_passed_over(trace_of):
    assert " has no line that is a request; " in refusal(lambda: trace_of("{", "[]", skip_bad=True))


def test_a_trace_whose_lines_all_lack_something_is_refused_when_it_is_read(trace_of):
    trace = trace_of('{"hash_ids": [0]}', skip_bad=True)
    assert refusal(lambda: list(trace)).endswith("has no requests: give a trace of at least one line")


@pytest.mark.parametrize("name", ["nowhere.jsonl", ""])
def test_a_path_that_is_no_file_is_refused(tmp_path, name):
    assert refusal(lambda: open_trace(tmp_path / name)).startswith(f"cannot read the trace {tmp_path / name}: ")


def test_blocks_without_tokens_are_refused(trace_of):
    assert refusal(lambda: trace_of(MOONCAKE, block_tokens=0)) == "a block has at least one token, not 0"
