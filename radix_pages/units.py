"""Units: slots, pages, frames and runs of pages. All arithmetic between them lives here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Ids = TypeVar("Ids", int, "np.ndarray")
"""One id or an array of ids."""


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open run [start, stop) of pages, counted from the first page of one node."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, num_pages: int) -> tuple[Span, Span]:
        """The first `num_pages` pages and the rest; raises ValueError when the span is shorter."""
        if not 0 <= num_pages <= len(self):
            raise ValueError(f"cannot split {num_pages} pages off a span of {len(self)}")
        middle = self.start + num_pages
        return Span(self.start, middle), Span(middle, self.stop)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How tokens, slots, pages and frames relate.

    `page_size` is in slots (one slot holds one token's KV). `token_bytes` is what one token takes in a tree key:
    8 for a plain int64 token id, 16 for a pair of them (EAGLE keys every position by two neighbouring tokens).
    Page 0 and with it frame 0 exist but never hold KV: SGLang writes the output of padding there.
    """

    page_size: int
    token_bytes: int = 8
    pages_per_frame: int = 1

    def __post_init__(self) -> None:
        for name in ("page_size", "token_bytes", "pages_per_frame"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def key_bytes_per_page(self) -> int:
        """Bytes of a tree key that one page of tokens takes."""
        return self.page_size * self.token_bytes

    def slots(self, num_pages: int) -> int:
        """Slots in `num_pages` pages."""
        return num_pages * self.page_size

    def whole_pages(self, num_slots: int) -> int:
        """Pages that `num_slots` slots fill completely."""
        return num_slots // self.page_size

    def pages_to_hold(self, num_slots: int) -> int:
        """The least pages with room for `num_slots` slots."""
        return -(-num_slots // self.page_size)

    def frames_to_hold(self, num_pages: int) -> int:
        """The least frames with room for `num_pages` pages: the packed floor of so many held pages."""
        return -(-num_pages // self.pages_per_frame)

    def page_of(self, slot: Ids) -> Ids:
        """The page that holds `slot`."""
        return slot // self.page_size

    def place_in_page(self, slot: Ids) -> Ids:
        """Where in its page `slot` is, from 0."""
        return slot % self.page_size

    def frame_of(self, page: Ids) -> Ids:
        """The frame that holds `page`."""
        return page // self.pages_per_frame

    def first_page(self, frame: Ids) -> Ids:
        """The first page of `frame`."""
        return frame * self.pages_per_frame

    def first_slot(self, page: Ids) -> Ids:
        """The first slot of `page`."""
        return page * self.page_size

    def slots_of(self, pages: np.ndarray) -> np.ndarray:
        """All slots of `pages`, one page after the other."""
        import numpy as np  # not for a command's --help

        slots: np.ndarray = self.first_slot(pages)[:, None] + np.arange(self.page_size)
        return slots.ravel()
