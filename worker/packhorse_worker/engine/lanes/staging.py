"""Many small arrays as one block of bytes, so that one copy brings all of them to a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT_BYTES = 256
"""Where an array may begin: what CUDA's own allocations keep to, and kernels that read wide want."""

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


@dataclass(frozen=True)
class Place:
    """Where one array lies in the block."""

    start: int
    """In bytes."""
    end: int
    format: np.dtype[Any]
    dtype: torch.dtype
    """The same for torch."""
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every array lies. Arrays of the same names, formats and sizes have the same plan."""

    places: Mapping[str, Place]
    nbytes: int

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Plan:
        """The plan for these arrays, in their order."""
        return _plan_of(tuple([(name, array.dtype, array.shape) for name, array in arrays.items()]))

    def write(self, arrays: Mapping[str, NDArray[Any]], block: torch.Tensor) -> None:
        """Copy the arrays into a block of bytes, uint8, on the host."""
        for name, room in self.rooms(block).items():
            room[...] = arrays[name]

    def rooms(self, block: torch.Tensor) -> dict[str, NDArray[Any]]:
        """The arrays in a block of bytes, uint8, on the host, as arrays that share its memory."""
        room = block.numpy()
        return {name: np.ndarray(each.shape, each.format, room, each.start) for name, each in self.places.items()}

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in a block of bytes, uint8, as tensors that share its memory."""
        return {name: block[place.start : place.end].view(place.dtype).view(place.shape) for name, place in self.places.items()}


@lru_cache(maxsize=4096)
def _plan_of(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> Plan:
    """The plan for arrays of these names, formats and sizes: batches of a shape share it."""
    places = {}
    end = 0
    for name, form, shape in arrays:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + form.itemsize * math.prod(shape)
        places[name] = Place(start, end, form, _DTYPES[form], shape)
    return Plan(places, end)


def room_for(nbytes: int) -> int:
    """Bytes of a block that shall hold so many: the next power of two, so that a block is rarely too small twice."""
    return 1 << max(16, math.ceil(math.log2(max(nbytes, 1))))
