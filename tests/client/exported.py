"""The metrics that the dashboard and the alert rules may name, and the labels that tell their series apart.

This is the only list of them; an engine test compares it with what a real server exports.
"""

PREFIX = "radix_pages:"

COUNTERS = (
    *("reclaimed_pages_total", "emptied_frames_total", "asked_tokens_total"),
    *("returned_frames_total", "returned_bytes_total", "regrown_frames_total"),
    *("commit_failures_total", "ceiling_refusals_total", "moved_pages_total", "moved_bytes_total"),
)
GAUGES = (
    *("mode", "degraded", "evicted_tokens_per_reclaimed_page"),
    *("held_pages", "stranded_pages", "empty_pages", "packed_floor_frames", "frames"),
    *("committed_bytes", "resident_bytes", "ceiling_bytes", "over_ceiling_frames", "reserve_frames"),
    *("returned_frames_now", "returned_bytes_now", "free_frames_target"),
)
HISTOGRAMS = ("evicted_page_age_seconds", "evicted_page_idle_seconds", "evicted_page_reuse", "trim_seconds")
SGLANGS = ("sglang:cache_hit_rate", "sglang:evicted_tokens_total")

EXPORTED = {
    *(PREFIX + name for name in (*COUNTERS, *GAUGES)),
    *(f"{PREFIX}{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
    *SGLANGS,
}
"""Samples as a server exports them: the names before the braces."""

RANK_LABELS = {"cache_type", "tp_rank", "pp_rank", "dp_rank"}
LABELS = RANK_LABELS | {"occupancy", "le"}
SCRAPE_LABELS = {"job", "instance"}
"""Added by Prometheus, not by a server."""
