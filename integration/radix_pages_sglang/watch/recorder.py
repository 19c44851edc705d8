"""Asks a server for its state again and again, and remembers how the sizes that a chart shows went."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radix_pages_sglang.client import Client, State
from radix_pages_sglang.serve import CommandError

MOST_SAMPLES = 3600
"""Samples that are remembered: an hour at one a second."""

Number = int | float | None


def _frame_bytes(state: State) -> int:
    return state["page_bytes"] * state["pages_per_frame"]


SERIES: dict[str, Callable[[State], Number]] = {
    "resident_bytes": lambda state: state["memory"]["resident_bytes"] if state["memory"] else None,
    "committed_bytes": lambda state: state["memory"]["committed_bytes"] if state["memory"] else None,
    "held_bytes": lambda state: state["held_pages"] * state["page_bytes"],
    "floor_bytes": lambda state: state["packed_floor"] * _frame_bytes(state),
    "reclaimed_bytes": lambda state: state["pages_reclaimed"] * state["page_bytes"],
    "returned_bytes_total": lambda state: state["memory"]["returned_bytes_total"] if state["memory"] else None,
    "hit_tokens": lambda state: state["hit_tokens"],
    "computed_tokens": lambda state: state["computed_tokens"],
}
"""What is remembered of each rank, and how it is read off its state."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look: its number, the second of the epoch, and for every rank the values of SERIES in their order."""

    number: int
    at: float
    ranks: list[list[Number]]


class Recorder:
    """Looks at a server every `interval` seconds once started; `picture` may be asked by any thread meanwhile.

    A server that goes away is asked on; what it said last is kept.
    """

    def __init__(self, server: Client, interval: float, most_samples: int = MOST_SAMPLES) -> None:
        self.server = server
        self.interval = interval
        self._samples: deque[Sample] = deque(maxlen=most_samples)
        self._states: list[State] = []
        self._trouble: dict[str, Any] | None = None
        self._began = time.time()
        self._asked_at: float | None = None
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin to look, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A look that is under way is not waited for: a busy server may answer late."""
        self._is_over.set()

    def look(self) -> None:
        """Ask the server once. What goes wrong is remembered for the page."""
        self._asked_at = time.time()
        try:
            states = self.server.states()
            sample = [[read_or_none(read, state) for read in SERIES.values()] for state in states]
        except CommandError as error:
            with self._lock:
                since = self._trouble["since"] if self._trouble else time.time()
                self._trouble = {"text": str(error), "since": since}
            return
        finally:
            self._asked_at = None
        with self._lock:
            self._trouble = None
            self._states = states
            number = self._samples[-1].number + 1 if self._samples else 1
            self._samples.append(Sample(number, time.time(), sample))

    def picture(self, after: int = 0) -> dict[str, Any]:
        """All that the page shows: the latest states, trouble, and the samples that came after number `after`."""
        with self._lock:
            return {
                "server": self.server.url,
                "interval": self.interval,
                "began": self._began,
                "now": time.time(),
                "asked": self._asked_at,
                "trouble": self._trouble,
                "ranks": self._states,
                "series": list(SERIES),
                "samples": [[each.number, each.at, each.ranks] for each in self._samples if each.number > after],
            }

    def _run(self) -> None:
        while not self._is_over.is_set():
            start = time.monotonic()
            self.look()
            self._is_over.wait(max(self.interval - (time.monotonic() - start), self.interval / 10))


def read_or_none(read: Callable[[State], Number], state: State) -> Number:
    """A value of `state`; None where the rank does not tell it, because its ledger cannot be read or it is older."""
    try:
        return read(state)
    except KeyError:
        return None
