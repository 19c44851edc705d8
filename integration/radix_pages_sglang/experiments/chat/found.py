"""What was measured, and what it comes to: both sides' quantities, their differences, and the documented keys."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from radix_pages_sglang.experiments.chat.load import Measured
from radix_pages_sglang.experiments.chat.sides import OURS, STOCK, Sample
from radix_pages_sglang.experiments.pairs import Difference, difference

NAMES = {OURS: "radix_pages", STOCK: "stock"}


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst on one side: in which pair, with which start of the servers, what clients saw, what was counted."""

    side: str
    pair: int
    start: int
    seen: Measured
    counts: Mapping[str, float]


@dataclass(slots=True)
class Found:
    """All that was measured. `memory` has the samples of each start; `page_bytes` is ours', where known."""

    bursts: list[Burst] = field(default_factory=list)
    memory: list[list[Sample]] = field(default_factory=list)
    page_bytes: int | None = None
    stall_ms: float = 100.0

    def sides(self) -> list[str]:
        return [name for name in NAMES if any(burst.side == name for burst in self.bursts)]

    def of(self, side: str) -> list[Burst]:
        """The bursts of one side, in order of their pairs."""
        return sorted((burst for burst in self.bursts if burst.side == side), key=lambda burst: burst.pair)

    def pairs(self) -> list[tuple[Burst, Burst]]:
        """Ours and stock's burst of each pair; none where there was one side."""
        if len(self.sides()) < 2:
            return []
        return list(zip(self.of(OURS), self.of(STOCK), strict=True))


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something that each burst measures; `key` is its name in the JSON."""

    key: str
    label: str
    value: Callable[[Measured], float]
    is_less_better: bool = True
    digits: int = 1

    @property
    def short(self) -> str:
        """A name without a unit, for charts of shares."""
        return self.key.removesuffix("_ms").replace("_", " ")


QUANTITIES = (
    Quantity("hit_rate", "hit rate", lambda seen: seen.hit_rate, is_less_better=False, digits=4),
    Quantity("ttft_p50_ms", "time to first token, median, ms", lambda seen: seen.ttft_p50_ms),
    Quantity("ttft_p90_ms", "time to first token, 90th percentile, ms", lambda seen: seen.ttft_p90_ms),
    Quantity("ttft_p99_ms", "time to first token, 99th percentile, ms", lambda seen: seen.ttft_p99_ms),
    Quantity("itl_p50_ms", "between tokens, median, ms", lambda seen: seen.itl_p50_ms),
    Quantity("itl_p99_ms", "between tokens, 99th percentile, ms", lambda seen: seen.itl_p99_ms),
    Quantity("throughput", "output tokens a second", lambda seen: seen.throughput, is_less_better=False),
    Quantity("longest_gap_ms", "longest wait between two tokens, ms", lambda seen: seen.longest_gap_ms),
    Quantity(
        "stalls",
        "long waits between tokens, of 1,000 tokens",
        lambda seen: 1000 * seen.gaps / max(seen.output_tokens, 1),
        digits=2,
    ),
)


def compared(found: Found, quantity: Quantity) -> tuple[dict[str, list[float]], Difference | None]:
    """The values of each side, and how much better ours was."""
    values = {side: [quantity.value(burst.seen) for burst in found.of(side)] for side in found.sides()}
    blocks: dict[int, list[tuple[float, float]]] = {}
    for ours, stock in found.pairs():
        blocks.setdefault(ours.start, []).append((quantity.value(ours.seen), quantity.value(stock.seen)))
    found_difference = difference(list(blocks.values()), is_less_better=quantity.is_less_better) if blocks else None
    return values, found_difference


def counted(found: Found, side: str) -> dict[str, float | None]:
    """What evictions did on one side in all bursts; None for what that side does not count."""
    totals: dict[str, float] = {}
    for burst in found.of(side):
        for key, value in burst.counts.items():
            totals[key] = totals.get(key, 0) + value
    evictions, asked = totals.get("evictions"), totals.get("asked_page_rounded")
    pages = totals.get("pages_reclaimed")
    page_bytes = found.page_bytes if side == OURS else None
    return {
        "evictions": evictions,
        "asked_tokens": totals.get("asked_tokens"),
        "asked_page_rounded": asked,
        "evicted_tokens": totals.get("evicted_tokens"),
        "over_eviction": round(totals["evicted_tokens"] / asked, 4) if asked else None,
        "eviction_ms": round(1e3 * totals["eviction_seconds"], 3) if evictions else None,
        "eviction_us": round(1e6 * totals["eviction_seconds"] / evictions, 1) if evictions else None,
        "reclaimed_pages": pages,
        "reclaimed_bytes": None if page_bytes is None or pages is None else pages * page_bytes,
        "emptied_frames": totals.get("frames_emptied"),
        "returned_frames": totals.get("returned_frames_total"),
        "returned_bytes": totals.get("returned_bytes_total"),
        "capped_tokens": totals.get("capped_tokens"),
        "moved_pages": totals.get("moved_pages"),
    }


COUNT_LABELS = {
    "evictions": "evictions",
    "asked_tokens": "tokens that allocations lacked",
    "asked_page_rounded": "the same in whole pages",
    "evicted_tokens": "tokens evicted",
    "over_eviction": "evicted / asked in whole pages",
    "eviction_ms": "time in evictions, ms",
    "eviction_us": "time of an eviction, µs",
    "reclaimed_pages": "pages reclaimed",
    "reclaimed_bytes": "bytes of KV in them",
    "emptied_frames": "frames emptied",
    "returned_frames": "frames given back to the system",
    "returned_bytes": "bytes given back to the system",
    "capped_tokens": "tokens evicted for the cap, beside those",
    "moved_pages": "pages moved",
}


def resident(found: Found, side: str) -> dict[str, int | None]:
    """Bytes that one side's scheduler occupied, over all starts: its anonymous memory and the KV mapping in it."""
    samples = [sample for start in found.memory for sample in start if sample.side == side]
    kv = [sample.kv_bytes for sample in samples if sample.kv_bytes is not None]
    process = [sample.process_bytes for sample in samples]
    return {
        "mean": round(statistics.mean(process)) if process else None,
        "most": max(process, default=None),
        "kv_mean": round(statistics.mean(kv)) if kv else None,
        "kv_most": max(kv, default=None),
    }


def values(found: Found) -> dict[str, Any]:
    """The documented keys."""
    sides = found.sides()
    pairs = found.pairs()
    result: dict[str, Any] = {
        "pairs": len(pairs),
        "starts": len({burst.start for burst in found.bursts}),
        "failed_requests": {side: sum(burst.seen.failed for burst in found.of(side)) for side in sides},
        "answers_equal": _equal(pairs, lambda seen: seen.answers),
        "prompt_lengths_equal": _equal(pairs, lambda seen: seen.prompt_lengths),
    }
    for quantity in QUANTITIES:
        by_side, better = compared(found, quantity)
        entry: dict[str, Any] = dict.fromkeys(NAMES)
        for side, measured in by_side.items():
            entry[side] = round(statistics.mean(measured), quantity.digits + 2)
            entry[f"{side}_range"] = [round(bound, quantity.digits + 2) for bound in (min(measured), max(measured))]
        entry |= {"difference_percent": better and round(better.percent, 2)}
        entry |= {name: None if better is None else rounded(getattr(better, name)) for name in ("low", "high")}
        result[quantity.key] = entry
    counts = {side: counted(found, side) for side in sides}
    result |= {key: {side: counts[side][key] if side in counts else None for side in NAMES} for key in COUNT_LABELS}
    result["resident_bytes"] = {side: resident(found, side) for side in sides}
    result["bursts"] = [_row(burst) for burst in sorted(found.bursts, key=lambda burst: (burst.pair, burst.side))]
    return result


def _equal(pairs: Sequence[tuple[Burst, Burst]], part: Callable[[Measured], Sequence[Any]]) -> dict[str, int]:
    both = [match for ours, stock in pairs for match in zip(part(ours.seen), part(stock.seen), strict=True)]
    return {"equal": sum(one == other for one, other in both), "total": len(both)}


def _row(burst: Burst) -> dict[str, Any]:
    seen = {key: value for key, value in asdict(burst.seen).items() if key not in ("answers", "prompt_lengths")}
    return {"side": burst.side, "pair": burst.pair, "start": burst.start, **seen, "counts": dict(burst.counts)}


def rounded(value: float | None) -> float | None:
    """To two decimals, as percentages are given."""
    return None if value is None else round(value, 2)
