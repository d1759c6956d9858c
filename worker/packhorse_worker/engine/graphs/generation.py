"""The sizes of graphs where a configuration names only the largest one. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, count

DEFAULT_BATCH_SIZE = 128
"""How far batch sizes go where nothing says it."""
_FIRST_NUM_TOKENS = 16
_FIRST_SEQ_LEN = 32


def batch_sizes_to(most: int, *, with_padding: bool) -> tuple[int, ...]:
    """1, 2, 4, then 8 to 128 by 8; without padding 1 to 32, 64, 128; then in both 256, 512, ...; and ``most``, none above."""
    padded, exact = chain((1, 2, 4), range(8, DEFAULT_BATCH_SIZE + 1, 8)), chain(range(1, 33), (64, DEFAULT_BATCH_SIZE))
    return _up_to(most, chain(padded if with_padding else exact, _doubled(2 * DEFAULT_BATCH_SIZE)))


def num_tokens_to(most: int) -> tuple[int, ...]:
    """16, 24, 32, 48, 64, 96, ...: powers of two and the middle between them; and ``most``, nothing above.

    Filling up wastes a third of the rows at worst. ``most`` below 16 is alone.
    """
    return _up_to(most, (size for power in _doubled(_FIRST_NUM_TOKENS) for size in (power, power * 3 // 2)))


def seq_lens_to(most: int) -> tuple[int, ...]:
    """32, 64, 128, ...: powers of two; and ``most``, nothing above. They cost no rows: kernels are launched for them."""
    return _up_to(most, _doubled(_FIRST_SEQ_LEN))


def _doubled(first: int) -> Iterator[int]:
    return (first << power for power in count())


def _up_to(most: int, rising: Iterable[int]) -> tuple[int, ...]:
    below = []
    for size in rising:
        if size >= most:
            break
        below.append(size)
    return (*below, most)
