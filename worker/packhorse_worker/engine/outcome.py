"""What became of a batch's inputs: outputs of forwards, sorted by input, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.messages import InputFailure
from packhorse_worker.backend import EncodedBatch

Row = TypeVar("Row")


@dataclass(frozen=True, eq=False)
class ForwardOutputs:
    """The outputs of one forward."""

    group: Sequence[int]
    """Indexes of its inputs."""
    outputs: torch.Tensor
    """float32: a row for each of them, or where ``tokens`` says it, for each of their tokens."""
    tokens: Sequence[int] | None

    def rows(self) -> Sequence[torch.Tensor]:
        """The output of each input: (width,), or (tokens, width)."""
        return self.outputs.unbind() if self.tokens is None else torch.split(self.outputs, list(self.tokens))

    def arrays(self) -> Iterable[NDArray[np.float32]]:
        """The same of outputs on the host, as arrays: a tenth of the time."""
        values: NDArray[np.float32] = self.outputs.numpy()
        return values if self.tokens is None else np.split(values, np.cumsum(self.tokens)[:-1])


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the inputs."""

    inputs: int
    """How many there are."""
    forwards: Sequence[ForwardOutputs]
    failures: list[InputFailure]
    """By index. Some of them may have outputs, which are no good."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """What the model raised on failed inputs, by index. May quote the input: for its owner only."""

    @cached_property
    def rows(self) -> list[torch.Tensor | None]:
        """Each input's output, float32: (dimension,); (tokens, width) of a token-level model or where token outputs were asked
        for; None where it failed."""
        return self._by_index(ForwardOutputs.rows)

    def encoded_batch(self, scored: Sequence[bool] = (), activation: Callable[..., torch.Tensor] | None = None) -> EncodedBatch:
        """The same for the broker: all values joined. The rows of inputs that are ``scored`` go through the ``activation``,
        which works on single values."""
        rows = self._by_index(ForwardOutputs.arrays)
        row_values = [0 if row is None else row.size for row in rows]
        present = [row.reshape(-1) for row in rows if row is not None]
        values = np.concatenate(present) if present else np.empty(0, dtype=np.float32)
        if activation is not None and any(scored):
            activated = activation(torch.from_numpy(values)).numpy()
            values = activated if all(scored) else np.where(np.repeat(scored, row_values), activated, values)
        return EncodedBatch(values=values.astype("<f4", copy=False), row_values=row_values, failures=self.failures)

    def _by_index(self, rows_of: Callable[[ForwardOutputs], Iterable[Row]]) -> list[Row | None]:
        found: list[Row | None] = [None] * self.inputs
        for forward in self.forwards:
            for index, row in zip(forward.group, rows_of(forward), strict=True):
                found[index] = row
        for failure in self.failures:
            found[failure.index] = None
        return found
