"""Where the inputs of one forward lie among its concatenated tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


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
    """Inputs one behind the other, without padding between them."""

    lengths: tuple[int, ...]
    """Tokens of each input, in order; none is 0."""
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all inputs."""
        return self.runs[-1].end

    @property
    def longest(self) -> int:
        """Tokens of the longest input."""
        return max(run.length for run in self.runs)

    def starts(self) -> list[int]:
        """Place of each input's first token."""
        return [run.start + number * run.length for run in self.runs for number in range(run.inputs)]

    def lasts(self) -> list[int]:
        """Place of each input's last token."""
        return [start + length - 1 for start, length in zip(self.starts(), self.lengths, strict=True)]


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
    """The layout of inputs of these lengths in this order; fewest runs when equal lengths stand together."""
    runs = []
    start = 0
    for length, group in itertools.groupby(lengths):
        run = Run(start, sum(1 for _ in group), length)
        runs.append(run)
        start = run.end
    return Layout(tuple(lengths), tuple(runs))
