"""What is measured: two models, their streams, and the memory they share, for the replay and for real servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from radix_pages_sglang.experiments.colocate.outcome import Judged, Memory, Speeds
from radix_pages_sglang.experiments.colocate.rules import Basis
from radix_pages_sglang.experiments.colocate.streams import Phases, Request, Shape, stream, traced

# Of one frame, a granule of 2 MiB in each buffer. kvcached's benchmarks/bench_vmm/README.md, sample output on an
# A100, averages of calls for pages of 2 MiB: cuMemCreate 193.32 us, cuMemMap 1.45, cuMemSetAccess 35.99, cuMemUnmap
# 25.63. It does not time cuMemRelease, which is left out here, too.
MAP_GRANULE_SECONDS = (193.32 + 1.45 + 35.99) * 1e-6
UNMAP_GRANULE_SECONDS = 25.63e-6

BUFFERS = 64
"""K and V of 32 layers: Llama-3.1-8B's geometry, 8 KV heads of 128 numbers of 2 bytes."""
TOKEN_BYTES = BUFFERS * 8 * 128 * 2
HBM_BYTES_PER_SECOND = 2.0e12
"""An A100's memory, rounded from its data sheet; a copied byte is read and written."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but rules and seeds."""

    shapes: tuple[Shape, Shape]
    phases: Phases
    memory: Memory
    speeds: Speeds
    judged: Judged
    basis: Basis
    traces: tuple[Path, Path] | None = None

    @property
    def most_prompt_pages(self) -> int:
        """Prompts of a trace are cut to as many pages: what a model keeps must hold the largest request."""
        return self.memory.budget_frames * self.memory.pages_per_frame // 16

    def streams(self, seed: int) -> tuple[list[Request], list[Request]]:
        """Both models' requests; the same ones for the same seed."""
        first, second = (self._stream(model, seed) for model in range(2))
        return first, second

    def _stream(self, model: int, seed: int) -> list[Request]:
        shape = self.shapes[model]
        if self.traces is None:
            return stream(shape, self.phases, model, seed)
        return traced(self.traces[model], shape, self.phases, model, seed, self.most_prompt_pages)

    def lasting(self, half_seconds: float, periods: int) -> Scenario:
        """The same with other phases; the first period warms up and does not count."""
        phases = Phases(half_seconds, periods)
        judged = replace(self.judged, warm_seconds=2 * half_seconds, end_seconds=phases.seconds)
        return replace(self, phases=phases, judged=judged)

    def with_frames(self, pages_per_frame: int) -> Scenario:
        """The same memory in frames of another size; what a frame takes to map is a granule in every buffer still."""
        memory = self.memory
        frames = memory.budget_frames * memory.pages_per_frame // pages_per_frame
        return replace(self, memory=replace(memory, budget_frames=frames, pages_per_frame=pages_per_frame))


REPLAYED = Scenario(
    shapes=(
        Shape(1.2, 0.08, document_pages=(40, 120), turn_pages=(4, 16), answer_tokens=(16, 160)),
        Shape(0.8, 0.06, document_pages=(60, 160), turn_pages=(4, 16), answer_tokens=(16, 160), pool_documents=40),
    ),
    phases=Phases(60.0, 5),
    memory=Memory(budget_frames=64, pages_per_frame=64, token_bytes=TOKEN_BYTES),
    speeds=Speeds(
        prefill_tokens_per_second=8_000.0,
        decode_step_seconds=0.025,
        map_frame_seconds=BUFFERS * MAP_GRANULE_SECONDS,
        unmap_frame_seconds=BUFFERS * UNMAP_GRANULE_SECONDS,
        copy_page_seconds=2 * 16 * TOKEN_BYTES / HBM_BYTES_PER_SECOND,
    ),
    judged=Judged(warm_seconds=120.0, end_seconds=600.0, limit_seconds=1.0),
    basis=Basis(half_life_seconds=8.0),
)
"""Two models of 8 billion weights share 8 GiB of KV on one GPU. The first gets more and shorter requests."""

_SERVED_SHAPE = Shape(
    3.0,
    0.1,
    document_pages=(16, 40),
    turn_pages=(2, 6),
    answer_tokens=(4, 12),
    thinking_seconds=1.5,
    most_turns=8,
    pool_documents=30,
    system_pages=4,
)
SERVED = Scenario(
    shapes=(_SERVED_SHAPE, replace(_SERVED_SHAPE, busy_rate=2.2, document_pages=(16, 48))),
    phases=Phases(8.0, 3),
    memory=Memory(budget_frames=64, pages_per_frame=16, token_bytes=512),
    speeds=Speeds(prefill_tokens_per_second=20_000.0, decode_step_seconds=0.01),
    judged=Judged(warm_seconds=16.0, end_seconds=48.0, limit_seconds=0.1),
    basis=Basis(half_life_seconds=2.0),
)
"""Two tiny servers on two cores share 8 MiB of KV: small, so that real memory pressure comes within seconds. Speeds
are for the replay that chooses settings, and do not matter to hits there."""


def paths_for(traces: Sequence[Path] | None) -> tuple[Path, Path] | None:
    """One trace for both models, or one each; None stands for synthetic streams."""
    return None if not traces else (traces[0], traces[-1])
