"""Runs inputs through a pipeline so that none harms another.

They are run in length-sorted groups that stay within the token budget. An input whose forward raises, whose output is not
finite, or which alone does not fit into memory fails by itself; its neighbours get their outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from packhorse_shared.messages import ErrorCode, InputFailure, ModelFacts, WorkerLimits
from packhorse_worker.backend import DeviceLostError, EncodedBatch
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.budget import TokenBudget
from packhorse_worker.engine.grouping import Grouping
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_LONGEST_MESSAGE = 256


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the inputs."""

    rows: list[torch.Tensor | None]
    """Each input's output, float32: (dimension,); (tokens, width) of a token-level model or where token outputs were asked for;
    None where it failed."""
    failures: list[InputFailure]
    """By index."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """What the model raised on failed inputs, by index. May quote the input: for its owner only."""

    def encoded_batch(self, scored: Sequence[bool] = (), activation: Callable[..., torch.Tensor] | None = None) -> EncodedBatch:
        """The same for the broker: all values joined. The rows of inputs that are ``scored`` go through the ``activation``,
        which works on single values."""
        row_values = [0 if row is None else row.numel() for row in self.rows]
        present = [row.reshape(-1) for row in self.rows if row is not None]
        values = torch.cat(present) if present else torch.empty(0, dtype=torch.float32)
        if activation is not None and any(scored):
            chosen = torch.tensor(scored).repeat_interleave(torch.tensor(row_values))
            values = torch.where(chosen, activation(values), values)
        return EncodedBatch(
            values=values.numpy().astype("<f4", copy=False),
            row_values=row_values,
            failures=self.failures,
        )


@dataclass(frozen=True)
class _How:
    """What a call asks for."""

    per_token: bool
    constants: Mapping[str, Any]
    to_host: bool
    progress: Callable[[int], None] | None


class Runner:
    """A pipeline with its facts and limits, fed any number of inputs at a time. For one thread at a time."""

    def __init__(self, pipeline: Pipeline, facts: ModelFacts, limits: WorkerLimits, grouping: Grouping) -> None:
        self.facts = facts
        self.limits = limits
        self.pipeline = pipeline
        self._budget = TokenBudget(limits.max_num_tokens)
        self._grouping = grouping

    def run(
        self,
        inputs: Sequence[Input],
        *,
        per_token: bool = False,
        constants: Mapping[str, Any] | None = None,
        to_host: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Run inputs, all with the same extras; each gets its output or its failure.

        ``per_token`` asks for a row for each token. ``constants`` are handed to the transformer as they are. ``to_host``
        copies outputs to the CPU. ``progress`` is told how many more inputs are done. Raises DeviceLostError when the process
        must end.
        """
        work = _Work(inputs, _How(per_token, constants or {}, to_host, progress))
        waiting = [index for index, each in enumerate(inputs) if self._is_sound(work, index, each)]
        waiting.sort(key=lambda index: len(inputs[index]), reverse=True)
        lengths = [len(inputs[index]) for index in waiting]
        done = 0
        while done < len(waiting):
            count = self._grouping.cut(lengths[done : done + self.limits.max_batch_size], self._budget.tokens)
            self._run(work, waiting[done : done + count])
            done += count
            work.tell(count)
        return work.outcome()

    def memory_bytes(self) -> int | None:
        """CUDA memory that this process's allocator holds; None on a CPU."""
        return int(torch.cuda.memory_reserved()) if self.pipeline.device.type == "cuda" else None

    def _is_sound(self, work: _Work, index: int, each: Input) -> bool:
        """Whether an input may reach the device at all: an id outside the table is fatal to a CUDA context."""
        rows = self.facts.vocabulary_rows
        if len(each) > self.facts.max_seq_len:
            work.fail(index, ErrorCode.INPUT_TOO_LONG, f"{len(each)} tokens, limit {self.facts.max_seq_len}")
        elif len(each) == 0 or int(each.ids.min()) < 0 or int(each.ids.max()) >= rows:
            segments = f", in segments 0 to {self.facts.segments - 1}" if self.facts.segments > 1 else ""
            work.fail(index, ErrorCode.FORWARD_FAILED, f"token ids must be one or more from 0 to {rows - 1}{segments}")
        else:
            return True
        return False

    def _run(self, work: _Work, group: list[int]) -> None:
        """Run inputs in one forward, in halves when it fails, down to the guilty one."""
        try:
            outputs = self.pipeline.forward(
                [work.inputs[index] for index in group], per_token=work.how.per_token, constants=work.how.constants
            )
            if work.how.to_host:
                outputs = outputs.cpu()
        except Exception as problem:
            code, message = _judge(problem)
            error = f"{type(problem).__name__}: {first_line(problem)}"
        else:
            self._budget.succeeded()
            self._take(work, group, outputs)
            return
        # Outside the handler: the exception's traceback holds the tensors of the failed forward.
        if code is ErrorCode.OUT_OF_MEMORY:
            self._out_of_memory(work, group)
        if len(group) == 1:
            log.warning("an input failed", extra={"code": code.value, "error": error, "tokens": len(work.inputs[group[0]])})
            work.fail(group[0], code, message, error)
            return
        middle = len(group) // 2
        self._run(work, group[:middle])
        self._run(work, group[middle:])

    def _take(self, work: _Work, group: list[int], outputs: torch.Tensor) -> None:
        spoiled = work.take(group, outputs, by_token=work.how.per_token or self.pipeline.is_per_token)
        if spoiled:
            code = ErrorCode.NON_FINITE_OUTPUT.value
            model = {"model": self.facts.name, "dtype": self.facts.dtype}
            log.warning("outputs that are not finite", extra={"code": code, **model, "inputs": spoiled, "of": len(group)})

    def _out_of_memory(self, work: _Work, group: list[int]) -> None:
        lengths = [len(work.inputs[index]) for index in group]
        area = sum(lengths) if self.pipeline.is_packed else len(group) * max(lengths)
        if len(group) > 1:
            self._budget.shrink(area)
        log.warning(
            "out of memory, going on in halves",
            extra={"inputs": len(group), "tokens": area, "token_budget": self._budget.tokens},
        )
        if self.pipeline.device.type == "cuda":
            torch.cuda.empty_cache()


class _Work:
    """The inputs of one call, and what has become of each so far."""

    def __init__(self, inputs: Sequence[Input], how: _How) -> None:
        self.inputs = inputs
        self.how = how
        self._rows: list[torch.Tensor | None] = [None] * len(inputs)
        self._failures: dict[int, InputFailure] = {}
        self._errors: dict[int, str] = {}

    def take(self, group: list[int], outputs: torch.Tensor, *, by_token: bool) -> int:
        """Keep the finite outputs of a group; NaN or infinity fails its own input only. Returns how many failed so."""
        rows = torch.split(outputs, [len(self.inputs[index]) for index in group]) if by_token else outputs.unbind()
        if bool(torch.isfinite(outputs).all()):
            finite = [True] * len(group)
        else:
            finite = [bool(torch.isfinite(row).all()) for row in rows]
        for index, row, is_finite in zip(group, rows, finite, strict=True):
            if is_finite:
                self._rows[index] = row
            else:
                self.fail(index, ErrorCode.NON_FINITE_OUTPUT, "the model's output for this input is not finite")
        return len(group) - sum(finite)

    def fail(self, index: int, code: ErrorCode, message: str, error: str = "") -> None:
        self._failures[index] = InputFailure(index, code, message[:_LONGEST_MESSAGE])
        if error:
            self._errors[index] = error

    def tell(self, inputs: int) -> None:
        if self.how.progress is not None:
            self.how.progress(inputs)

    def outcome(self) -> Outcome:
        return Outcome(self._rows, [self._failures[index] for index in sorted(self._failures)], self._errors)


def _judge(problem: Exception) -> tuple[ErrorCode, str]:
    """What a failed forward means for its inputs. Raises DeviceLostError where no further forward can succeed."""
    text = str(problem)
    if isinstance(problem, MemoryError | torch.OutOfMemoryError) or _is_allocation(text):
        return ErrorCode.OUT_OF_MEMORY, "this input does not fit into the device's memory"
    if isinstance(problem, torch.AcceleratorError) or "CUDA error" in text or "device-side assert" in text:
        raise DeviceLostError(f"{type(problem).__name__}: {first_line(problem)}") from problem
    # The text of an exception may quote the input, so only its type goes to the client.
    return ErrorCode.FORWARD_FAILED, f"the model raised {type(problem).__name__} on this input"


def _is_allocation(text: str) -> bool:
    return any(mark in text for mark in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"))
