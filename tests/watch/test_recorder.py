"""What is remembered of a server, and what is said when it goes away."""

from __future__ import annotations

import pytest

from radix_pages_sglang.client import Client, UnreachableError
from radix_pages_sglang.serve import CommandError
from radix_pages_sglang.watch.recorder import SERIES, Recorder
from tests.client.fake_server import FRAME_BYTES
from tests.watch.states import looking, mapped


@pytest.fixture
def answers(monkeypatch) -> list:
    """What the server says, one look after another; an exception is raised."""
    coming: list = []

    def states(_):
        answer = coming.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Client, "states", states)
    return coming


def looked(answers: list, *said, most_samples: int = 100) -> Recorder:
    answers += said
    recorder = Recorder(Client("http://127.0.0.1:1"), 1.0, most_samples)
    for _ in said:
        recorder.look()
    return recorder


def values(recorder: Recorder, name: str, rank: int = 0) -> list:
    column = list(SERIES).index(name)
    return [ranks[rank][column] for _, _, ranks in recorder.picture()["samples"]]


def test_each_look_is_a_sample_of_every_rank(answers):
    recorder = looked(answers, [mapped(), looking()], [mapped() | {"hit_tokens": 700}, looking()])
    assert [number for number, _, _ in recorder.picture()["samples"]] == [1, 2]
    assert values(recorder, "hit_tokens") == [600, 700]
    assert values(recorder, "hit_tokens", rank=1) == [600, 600]


def test_sizes_are_in_bytes(answers):
    recorder = looked(answers, [mapped()])
    assert values(recorder, "resident_bytes") == [5 * FRAME_BYTES + FRAME_BYTES // 2]
    assert values(recorder, "committed_bytes") == [6 * FRAME_BYTES]
    assert values(recorder, "held_bytes") == [3 * FRAME_BYTES]
    assert values(recorder, "floor_bytes") == [3 * FRAME_BYTES]
    assert values(recorder, "reclaimed_bytes") == [6 * FRAME_BYTES // 4]
    assert values(recorder, "returned_bytes_total") == [9 * FRAME_BYTES]


def test_what_a_rank_does_not_tell_is_none(answers):
    broken = {key: value for key, value in mapped().items() if key != "held_pages"}
    recorder = looked(answers, [looking()], [broken])
    assert values(recorder, "resident_bytes") == [None, 5 * FRAME_BYTES + FRAME_BYTES // 2]
    assert values(recorder, "held_bytes") == [3 * FRAME_BYTES, None]


def test_only_samples_that_are_new_are_given(answers):
    recorder = looked(answers, *[[mapped()]] * 4)
    assert [number for number, _, _ in recorder.picture(after=2)["samples"]] == [3, 4]
    assert recorder.picture(after=4)["samples"] == []


def test_the_oldest_samples_are_forgotten(answers):
    recorder = looked(answers, *[[mapped()]] * 5, most_samples=3)
    assert [number for number, _, _ in recorder.picture()["samples"]] == [3, 4, 5]


def test_while_the_server_is_gone_the_last_states_stay_and_the_time_it_went_is_told(answers):
    gone = UnreachableError("no server answers")
    recorder = looked(answers, [mapped()], gone)
    first = recorder.picture()
    answers.append(CommandError("the server restarts"))
    recorder.look()
    later = recorder.picture()
    assert first["ranks"] == later["ranks"] == [mapped()]
    assert (first["trouble"]["text"], later["trouble"]["text"]) == ("no server answers", "the server restarts")
    assert first["trouble"]["since"] == later["trouble"]["since"] <= first["now"]


def test_a_server_that_comes_back_is_in_no_trouble(answers):
    recorder = looked(answers, UnreachableError("no server answers"), [mapped()])
    assert recorder.picture()["trouble"] is None
    assert len(recorder.picture()["samples"]) == 1


def test_a_question_without_an_answer_yet_is_told(monkeypatch):
    recorder = Recorder(Client("http://127.0.0.1:1"), 1.0)
    asked = []

    def states(_):
        asked.append(recorder.picture()["asked"])
        return [mapped()]

    monkeypatch.setattr(Client, "states", states)
    recorder.look()
    assert asked[0] <= recorder.picture()["now"]
    assert recorder.picture()["asked"] is None
