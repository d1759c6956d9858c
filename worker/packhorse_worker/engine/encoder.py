"""Runs batches through a pipeline so that no input harms another.

A batch is run in length-sorted groups whose padded area stays within the token budget. An input whose forward raises, whose
vector is not finite, or which alone does not fit into memory fails by itself; its neighbours get their vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.messages import EncodeOptions, ErrorCode, InputFailure, ModelFacts, WorkerLimits
from packhorse_worker.backend import DeviceLostError, EncodedBatch
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grouping:
    """How a batch is cut into padded forwards, longest inputs first."""

    most_tokens: int
    """Padded area at which a forward is wide enough."""
    fewest_rows: int
    """A forward of fewer rows than this takes another one whatever it wastes."""
    most_waste: float
    """Share of the area that may be padding."""


_GROUPINGS = {"cpu": Grouping(2048, 4, 0.15), "cuda": Grouping(1 << 30, 32, 0.5)}
"""A CPU gains nothing beyond some two thousand tokens, so padding costs it dearly: MiniLM takes 275 ms instead of 820 for 32
mixed texts, and 77 as before for 32 of like length. A GPU wants its forwards wide."""
_EQUAL_LENGTHS = Grouping(1 << 30, 1, 0.0)
_LONGEST_MESSAGE = 256
_FORWARDS_TO_RECOVER = 64


class TokenBudget:
    """The padded area that one forward may have: halved when memory runs out, back after a while without trouble."""

    def __init__(self, tokens: int) -> None:
        self._full = tokens
        self._good = 0
        self.tokens = tokens

    def shrink(self, failed_area: int) -> None:
        """A forward of this area ran out of memory."""
        self.tokens = max(1, min(self.tokens, failed_area) // 2)
        self._good = 0

    def succeeded(self) -> None:
        """A forward went well."""
        if self.tokens < self._full:
            self._good += 1
            if self._good >= _FORWARDS_TO_RECOVER:
                self.tokens = min(self._full, self.tokens * 2)
                self._good = 0


class Encoder:
    """A ``Backend``: a pipeline with its facts and limits, fed batch by batch."""

    def __init__(self, pipeline: Pipeline, facts: ModelFacts, limits: WorkerLimits, *, pads: bool = True) -> None:
        """``pads`` False runs only inputs of equal length together, for models that padding would disturb."""
        self.facts = facts
        self.limits = limits
        self._pipeline = pipeline
        self._budget = TokenBudget(limits.max_num_tokens)
        self._grouping = _GROUPINGS[pipeline.device.type] if pads else _EQUAL_LENGTHS

    def encode(self, ids: Sequence[NDArray[np.int32]], options: Sequence[EncodeOptions]) -> EncodedBatch:
        """Encode a batch; see ``Backend.encode``."""
        batch = _Batch(ids, options)
        sound = [index for index, each in enumerate(ids) if self._is_sound(batch, index, each)]
        lengths = [len(each) for each in ids]
        waiting = sorted(sound, key=lambda index: lengths[index], reverse=True)
        while waiting:
            group = _next_group(waiting, lengths, self._grouping, self._budget.tokens)
            waiting = waiting[len(group) :]
            self._run(batch, group)
        return batch.result()

    def memory_bytes(self) -> int | None:
        """CUDA memory that this process's allocator holds; None on a CPU."""
        return int(torch.cuda.memory_reserved()) if self._pipeline.device.type == "cuda" else None

    def _is_sound(self, batch: _Batch, index: int, ids: NDArray[np.int32]) -> bool:
        """Whether an input may reach the device at all: an id outside the table is fatal to a CUDA context."""
        rows = self.facts.vocabulary_rows
        if len(ids) > self.facts.max_seq_len:
            batch.fail(index, ErrorCode.INPUT_TOO_LONG, f"{len(ids)} tokens, limit {self.facts.max_seq_len}")
        elif len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= rows:
            batch.fail(index, ErrorCode.FORWARD_FAILED, f"token ids must be one or more from 0 to {rows - 1}")
        else:
            return True
        return False

    def _run(self, batch: _Batch, group: list[int]) -> None:
        """Run inputs in one forward, in halves when it fails, down to the guilty one."""
        try:
            vectors = self._pipeline.forward(
                [batch.ids[index] for index in group], [batch.options[index].prompt_tokens for index in group]
            )
        except Exception as problem:
            code, message = _judge(problem)
            error = f"{type(problem).__name__}: {first_line(problem)}"
        else:
            self._budget.succeeded()
            batch.take(group, vectors)
            return
        # Outside the handler: the exception's traceback holds the tensors of the failed forward.
        if code is ErrorCode.OUT_OF_MEMORY:
            self._out_of_memory(batch, group)
        if len(group) == 1:
            log.warning("an input failed", extra={"code": code.value, "error": error, "tokens": len(batch.ids[group[0]])})
            batch.fail(group[0], code, message)
            return
        middle = len(group) // 2
        self._run(batch, group[:middle])
        self._run(batch, group[middle:])

    def _out_of_memory(self, batch: _Batch, group: list[int]) -> None:
        area = len(group) * max(len(batch.ids[index]) for index in group)
        if len(group) > 1:
            self._budget.shrink(area)
        log.warning(
            "out of memory, going on in halves",
            extra={"inputs": len(group), "padded_tokens": area, "token_budget": self._budget.tokens},
        )
        if self._pipeline.device.type == "cuda":
            torch.cuda.empty_cache()


class _Batch:
    """The inputs of one batch, and what has become of each so far."""

    def __init__(self, ids: Sequence[NDArray[np.int32]], options: Sequence[EncodeOptions]) -> None:
        self.ids = ids
        self.options = options
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._failures: dict[int, InputFailure] = {}

    def take(self, group: list[int], vectors: NDArray[np.float32]) -> None:
        """Keep the finite vectors of a group; NaN or infinity fails its own input only."""
        for index, vector in zip(group, vectors, strict=True):
            if np.isfinite(vector).all():
                self._rows[index] = vector
            else:
                self.fail(index, ErrorCode.NON_FINITE_OUTPUT, "the model's output for this input is not finite")

    def fail(self, index: int, code: ErrorCode, message: str) -> None:
        self._failures[index] = InputFailure(index, code, message[:_LONGEST_MESSAGE])

    def result(self) -> EncodedBatch:
        rows = [self._rows.get(index) for index in range(len(self.ids))]
        present = [row for row in rows if row is not None]
        return EncodedBatch(
            values=np.concatenate(present).astype("<f4", copy=False) if present else np.empty(0, dtype="<f4"),
            row_values=[0 if row is None else len(row) for row in rows],
            failures=[self._failures[index] for index in sorted(self._failures)],
        )


def _next_group(order: Sequence[int], lengths: Sequence[int], grouping: Grouping, budget: int) -> list[int]:
    """The first inputs of ``order`` (longest first) that run together in a padded area of at most ``budget`` tokens.

    An input longer than the budget stands alone.
    """
    longest = real = lengths[order[0]]
    most_rows = max(1, min(grouping.most_tokens, budget) // longest)
    rows = 1
    for index in order[1:most_rows]:
        real += lengths[index]
        if rows >= grouping.fewest_rows and real < (1 - grouping.most_waste) * longest * (rows + 1):
            break
        rows += 1
    return list(order[:rows])


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
