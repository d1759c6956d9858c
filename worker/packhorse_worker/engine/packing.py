"""Where the inputs of one forward lie among its concatenated tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Run:
    """Neighbours of equal length: one call of an attention kernel."""

    start: int
    """Place of its first token."""
    inputs: int
    length: int
    """Tokens of each of its inputs."""

    @property
    def end(self) -> int:
        """Place behind its last token."""
        return self.start + self.inputs * self.length


@dataclass(frozen=True, order=True)
class Shape:
    """What sizes the tensors of one forward: two batches of one shape differ in values only."""

    num_tokens: int
    """Rows of the forward, filler behind the tokens included."""
    batch_size: int
    seq_len: int
    """No input is longer. Kernels are launched for so many tokens; of a padded forward it is the width."""


@dataclass(frozen=True)
class Layout:
    """Inputs one behind the other, without padding between them. Nobody writes to its arrays."""

    lengths: tuple[int, ...]
    """Tokens of each input, in order; none is 0."""
    tokens: int
    """Tokens of all inputs."""
    longest: int
    """Tokens of the longest input."""
    offsets: NDArray[np.int64] = field(compare=False)
    """Place of each input's first token, and the end of the last: one more than inputs."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """Place of each input's first token."""
        return self.offsets[:-1]

    @property
    def lasts(self) -> NDArray[np.int64]:
        """Place of each input's last token."""
        return self.offsets[1:] - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """``lengths`` as an array."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def within(self) -> NDArray[np.int64]:
        """Place of each token in its own input, shape (tokens,)."""
        places = np.arange(self.tokens)
        return places if len(self.lengths) == 1 else places - self.starts.repeat(self.sizes)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Fewest when equal lengths stand together."""
        runs = []
        start = 0
        for length, group in itertools.groupby(self.lengths):
            run = Run(start, sum(1 for _ in group), length)
            runs.append(run)
            start = run.end
        return tuple(runs)


_STEPS = ((64, 1), (256, 8), (1024, 16), (4096, 32), (1 << 40, 64))
"""Up to how many tokens, and to multiples of what they are rounded up."""


def rows_for(tokens: int) -> int:
    """Rows of a packed forward over so many tokens: a few more, so that there are only some 230 sizes up to 4,096.

    On a CPU, for each new size oneDNN prepares its kernels anew (1 to 3 ms for MiniLM; it keeps 1,024 of them), and the C
    library's heap breaks into pieces that fit no other size: one float32 layer fed with random sizes grew by 2 GB within 3,000
    forwards and went on, while all of MiniLM with rounded sizes grows by 0.4 GB within 1,000 and stays there. On a GPU the
    allocator and cuBLAS meet fewer sizes too. The rows cost about 1 %.
    """
    step = next(step for most, step in _STEPS if tokens <= most)
    return -(-tokens // step) * step


def layout_of(lengths: Sequence[int]) -> Layout:
    """The layout of inputs of these lengths in this order; at least one."""
    ends = [*itertools.accumulate(lengths, initial=0)]
    return Layout(tuple(lengths), ends[-1], max(lengths), np.array(ends, dtype=np.int64))
