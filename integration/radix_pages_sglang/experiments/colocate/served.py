"""Both models as real servers with random weights: what the replay models is measured here, on this machine.

The ceilings of the two are moved by the same broker, over SGLang's `/set_internal_state`, from a thread of the one
client that drives both streams; all it reads is `/server_info`. What a server occupies is read from /proc.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from radix_pages_sglang.client import CEILING, MODE, TRIM, Client, State
from radix_pages_sglang.experiments.colocate.broker import Broker
from radix_pages_sglang.experiments.colocate.outcome import Memory, Outcome, Sample, Served, outcome
from radix_pages_sglang.experiments.colocate.rules import OURS, Rule
from radix_pages_sglang.experiments.colocate.scenarios import Scenario
from radix_pages_sglang.experiments.colocate.streams import PAGE_TOKENS, Request, tokens
from radix_pages_sglang.knobs import MODES
from radix_pages_sglang.local_server import Server, serving_together, start
from radix_pages_sglang.resident import resident_bytes

TICK_SECONDS = 0.25
"""How often the broker looks, unless a request waits for it."""

WATCH_SECONDS = 0.02
"""How often /proc is read while a server gives back."""

ANSWER_SECONDS = 60.0
"""A request that is not answered after so long has failed."""

MOST_AT_ONCE = 128
"""Requests that the client has open."""


class ServedModel:
    """A real server as a broker sees it (`broker.Model`). `look` reads its state anew; all else is as of then."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = Client(server.url)
        self.served: list[Served] = []
        self.lend_seconds: list[float] = []
        self._watch: threading.Event | None = None
        self.look()
        self.frame_bytes: int = self._memory["frame_bytes"]
        self.pages_per_frame: int = self.state["pages_per_frame"]

    def look(self) -> None:
        self.state: State = self.client.states()[0]

    @property
    def _memory(self) -> State:
        memory: State = self.state["memory"]
        return memory

    @property
    def committed_frames(self) -> int:
        return int(self._memory["committed_frames"])

    @property
    def ceiling_frames(self) -> int:
        knob = self.state["knobs"][CEILING]
        return int(knob["maximum"] if knob["value"] < 0 else knob["value"]) // self.frame_bytes

    @property
    def reserved_frames(self) -> int:
        """What running requests hold now, and a frame for what they will ask for."""
        held = self.state["held_pages"] - self.state["cached_tokens"] // PAGE_TOKENS
        return -(-(held + 1) // self.pages_per_frame) + 1

    @property
    def demand_tokens(self) -> int:
        return int(self.state["computed_tokens"])

    @property
    def is_idle(self) -> bool:
        return not self.state["running_requests"] and not self.state["waiting_requests"]

    def settled_at(self, now: float) -> float:
        return now

    @property
    def failed_commits(self) -> int:
        return int(self._memory["commit_failures"])

    @property
    def moved_pages(self) -> int:
        return int(self._memory["moved_pages"])

    def set_ceiling(self, num_frames: int) -> None:
        """Set it; if the server has to give back for it, time until the system has the memory."""
        self.stop_watching()
        bound, is_above = num_frames * self.frame_bytes, num_frames < self.committed_frames
        begun = time.perf_counter()
        self.client.set(CEILING, bound)
        if is_above:
            self._watch = threading.Event()
            threading.Thread(target=self._until_below, args=(bound, begun, self._watch), daemon=True).start()
        self.look()

    def flush(self) -> None:
        self.server.request("/flush_cache", {})

    def reset(self, mode: str, num_frames: int) -> None:
        """For the next run: nothing cached, this mode and ceiling, nothing counted."""
        self.stop_watching()
        self.flush()
        self.client.set(MODE, MODES.index(mode))
        self.client.set(CEILING, num_frames * self.frame_bytes)
        self.client.set(TRIM, 1)
        self.served, self.lend_seconds = [], []
        self.look()

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.set()

    def _until_below(self, bound: int, begun: float, is_over: threading.Event) -> None:
        memory = self._memory
        while not is_over.wait(WATCH_SECONDS):
            if resident_bytes(*memory["region"], pid=memory["pid"]) <= bound:
                self.lend_seconds.append(time.perf_counter() - begun)
                return


@contextmanager
def two_servers(memory: Memory, running_requests: int = 32) -> Iterator[list[ServedModel]]:
    """Two tiny servers in mode move, started together, warmed up, and stopped at the end, whatever happens.

    Raises CommandError or ServerError when one of them does not start.
    """
    from radix_pages_sglang.cpu_engine.checkpoints import tiny_llama

    model = tiny_llama()
    frame_tokens = memory.pages_per_frame * PAGE_TOKENS
    arguments = (
        *("--load-format", "dummy", "--dtype", "float32", "--page-size", str(PAGE_TOKENS), "--sleep-on-idle"),
        *("--max-total-tokens", str(memory.budget_frames * frame_tokens)),
        *("--max-running-requests", str(running_requests)),
    )
    environment = {
        **{"RADIX_PAGES_MODE": "move", "RADIX_PAGES_IDLE_TRIM_SECONDS": "0", "OMP_NUM_THREADS": "1"},
        "RADIX_PAGES_FRAME_TOKENS": str(frame_tokens),
    }
    with tempfile.TemporaryDirectory(prefix="radix-pages-colocate-") as folder:
        logs = [Path(folder) / f"{place}.log" for place in range(2)]
        starts = [partial(start, model, *arguments, log=log, env=environment) for log in logs]
        with serving_together(starts) as servers, ThreadPoolExecutor(len(servers)) as pool:
            models = [ServedModel(server) for server in servers]
            list(pool.map(_warm_up, models))
            yield models


def _warm_up(model: ServedModel) -> None:
    """The first requests pay for what torch prepares once."""
    for first in range(1_000, 1_003):
        model.server.generate([first] * 300, 8)


def serve(
    rule: Rule,
    setting: float,
    models: Sequence[ServedModel],
    streams: Sequence[Sequence[Request]],
    scenario: Scenario,
) -> Outcome:
    """Drive both streams in real time, and the broker beside them; returns when everything was answered.

    Raises CommandError when a server does not answer or refuses what the broker asks.
    """
    budget = scenario.memory.budget_frames
    for model in models:
        model.reset("move" if rule is OURS else "return", budget // 2)
    failed, moved = (sum(getattr(model, what) for model in models) for what in ("failed_commits", "moved_pages"))
    run = _Run(rule.make_broker(models, budget, setting, scenario.basis), models)
    run.drive(streams)
    for model in models:
        model.stop_watching()
        model.look()
    found = outcome(
        [one for model in models for one in model.served],
        (),
        run.samples,
        scenario.judged,
        failed_commits=sum(model.failed_commits for model in models) - failed,
        moved_pages=sum(model.moved_pages for model in models) - moved,
    )
    return replace(found, lend_seconds=tuple(seconds for model in models for seconds in model.lend_seconds))


class _Run:
    """One stretch of real time: the client's threads, and the broker's."""

    def __init__(self, broker: Broker, models: Sequence[ServedModel]) -> None:
        self.samples: list[Sample] = []
        self._broker = broker
        self._models = models
        self._nudge = threading.Event()
        self._is_over = threading.Event()
        self._problem: Exception | None = None
        self._begun = time.perf_counter()

    def drive(self, streams: Sequence[Sequence[Request]]) -> None:
        """Send every request at its time, and wait for the last answer."""
        thread = threading.Thread(target=self._broke)
        thread.start()
        order = sorted(
            ((one.seconds, place, one) for place, stream in enumerate(streams) for one in stream),
            key=lambda one: one[:2],
        )
        try:
            with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
                for seconds, place, request in order:
                    prompt = [token for page in request.pages for token in tokens(page)]
                    time.sleep(max(self._begun + seconds - time.perf_counter(), 0.0))
                    if self._problem is not None:
                        break
                    pool.submit(self._ask, place, prompt, request)
        finally:
            self._is_over.set()
            self._nudge.set()
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _broke(self) -> None:
        """Let the broker look at both servers again and again."""
        try:
            while not self._is_over.is_set():
                self._nudge.wait(TICK_SECONDS)
                self._nudge.clear()
                for model in self._models:
                    model.look()
                first, second = self._models
                now = time.perf_counter() - self._begun
                ceilings = (first.ceiling_frames, second.ceiling_frames)
                self.samples.append(Sample(now, (first.committed_frames, second.committed_frames), ceilings))
                self._broker.tick(now)
        except Exception as problem:  # raised again by the thread that drives the streams
            self._problem = problem

    def _ask(self, place: int, prompt: list[int], request: Request) -> None:
        """Send one request and note how it fared; time runs from when it was due."""
        model, due = self._models[place], self._begun + request.seconds
        while not self._broker.admit(place) and self._problem is None:
            self._nudge.set()
            time.sleep(WATCH_SECONDS)
        fared = Served(request.seconds, request.prompt_tokens)
        try:
            first, hit_tokens = _answer(model.server.url, prompt, request.answer_tokens)
            fared = replace(fared, hit_tokens=hit_tokens, first_token_seconds=first - due)
        except (OSError, HTTPException, ValueError, KeyError) as problem:
            fared = replace(fared, problem=str(problem))
        model.served.append(fared)


def _answer(url: str, prompt: list[int], answer_tokens: int) -> tuple[float, int]:
    """When the first token came (by the performance counter), and how much of the prompt was cached.

    Raises ValueError when the answer ended early, OSError or HTTPException when none came.
    """
    sampling = {"max_new_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()
    asked = HttpRequest(f"{url}/generate", body, {"Content-Type": "application/json"})
    first, meta = 0.0, {}
    with urlopen(asked, timeout=ANSWER_SECONDS) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                chunk = json.loads(line[6:])
                if "meta_info" not in chunk:
                    raise ValueError(str(chunk))
                meta = chunk["meta_info"]
    reason = meta.get("finish_reason")
    if not reason or reason["type"] != "length":
        raise ValueError(f"the answer ended with {reason}")
    return first, meta["cached_tokens"]
