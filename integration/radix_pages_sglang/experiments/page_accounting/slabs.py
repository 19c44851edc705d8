"""A slab allocator, as kernels have them: objects of one size in slabs; a slab is given back with its last object."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Objects = NDArray[np.int64]


class Slabs:
    """Hands out objects from slabs of `objects_a_slab`. An object's id is its slab's number times that + its place.

    New objects fill the holes of slabs that have some before a slab is added. Ids of slabs that were given back come
    again when slabs are added.
    """

    def __init__(self, objects_a_slab: int) -> None:
        self.objects_a_slab = objects_a_slab
        self._is_used: NDArray[np.bool_] = np.zeros((0, objects_a_slab), dtype=np.bool_)
        self._is_there: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)

    @property
    def num_slabs(self) -> int:
        """Slabs that have memory."""
        return int(self._is_there.sum())

    def has_memory(self, objects: Objects) -> NDArray[np.bool_]:
        """Whether the slab of each object is there."""
        return self._is_there[objects // self.objects_a_slab]

    def is_used(self, objects: Objects) -> NDArray[np.bool_]:
        used: NDArray[np.bool_] = self._is_used.reshape(-1)[objects]
        return used

    def take(self, count: int) -> Objects:
        """`count` objects, those of partly used slabs first, by number."""
        holes = self._holes()[:count]
        lacking = -(-(count - len(holes)) // self.objects_a_slab)
        if lacking > 0:
            self._add(lacking)
            holes = np.concatenate((holes, np.setdiff1d(self._holes(), holes)))[:count]
        self._is_used.reshape(-1)[holes] = True
        return holes

    def give(self, objects: Objects) -> int:
        """`objects` are used no more; how many slabs were given back. Raises ValueError for one that is not used."""
        used = self._is_used.reshape(-1)
        if len(np.unique(objects)) != len(objects) or not used[objects].all():
            raise ValueError("an object is given back twice")
        used[objects] = False
        is_done = self._is_there & ~self._is_used.any(axis=1)
        self._is_there &= ~is_done
        return int(is_done.sum())

    def _holes(self) -> Objects:
        """Objects that are not used in slabs that are there."""
        return np.flatnonzero((~self._is_used & self._is_there[:, None]).reshape(-1))

    def _add(self, count: int) -> None:
        """Give memory to `count` more slabs, numbers that are free first."""
        missing = max(count - int((~self._is_there).sum()), 0)
        self._is_used = np.concatenate((self._is_used, np.zeros((missing, self.objects_a_slab), dtype=np.bool_)))
        self._is_there = np.concatenate((self._is_there, np.zeros(missing, dtype=np.bool_)))
        self._is_there[np.flatnonzero(~self._is_there)[:count]] = True
