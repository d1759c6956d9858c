"""What ``Encoder.encode`` gives back, and the error that tells which inputs have no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packhorse_shared.errors import PackhorseError
from packhorse_shared.messages import InputFailure
from packhorse_worker.engine.api.inputs import Asked, Text, Tokens
from packhorse_worker.engine.outcome import Outcome

_LISTED_FAILURES = 8


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """The model's output for one input."""

    logits: torch.Tensor
    """float32. One vector per input: shape (dimension,). One row per token: (tokens, width), or flattened."""
    prompt_token_ids: list[int]
    """What the model read: special tokens and the model's own prompt included."""
    prompt: str | None = None
    """The input's text as it was given; None for token ids."""


class EncodeError(PackhorseError, RuntimeError):
    """Some inputs of a call have no output: the model raised on them, its output is not finite, or memory did not suffice."""

    def __init__(self, failures: Sequence[InputFailure], outputs: Sequence[EncoderOutput | None]) -> None:
        listed = [f"inputs[{each.index}]: {each.message}" for each in failures[:_LISTED_FAILURES]]
        if len(failures) > _LISTED_FAILURES:
            listed.append(f"and {len(failures) - _LISTED_FAILURES} more")
        super().__init__(f"{len(failures)} of {len(outputs)} inputs failed; {'; '.join(listed)}")
        self.failures = list(failures)
        """``index``, ``code`` and ``message`` of each, in the order of the inputs."""
        self.outputs = list(outputs)
        """The output of every input, in their order; None for one that failed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures, self.outputs)


def outputs_of(asked: Sequence[Asked], tokens: Sequence[Tokens], outcome: Outcome, *, flat: bool) -> list[EncoderOutput | None]:
    """One output per input, None for those that failed. ``flat`` makes one vector of the rows of an input's tokens."""
    outputs: list[EncoderOutput | None] = []
    for question, each, row in zip(asked, tokens, outcome.rows, strict=True):
        if row is None:
            outputs.append(None)
            continue
        # A copy is a tensor of its own: autograd takes it, and it keeps no whole forward's outputs alive.
        logits = (row.flatten() if flat else row).clone()
        outputs.append(EncoderOutput(logits, each.ids, question.text if isinstance(question, Text) else None))
    return outputs


def failures_of(outcome: Outcome) -> list[InputFailure]:
    """The failures of a call, with what the model raised: the caller may know it, since the inputs are its own."""
    told = [(each, outcome.errors.get(each.index)) for each in outcome.failures]
    return [each if error is None else InputFailure(each.index, each.code, f"{each.message}: {error}") for each, error in told]


def joined(outcome: Outcome) -> torch.Tensor:
    """The rows of a call in which no input failed, as one tensor of two dimensions."""
    return torch.cat([row if row.ndim == 2 else row[None] for row in outcome.rows if row is not None])
