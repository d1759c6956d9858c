"""Runs inputs through a model so that none harms another.

They are run in length-sorted groups that stay within the token budget. An input whose forward raises, whose output is not
finite, or which alone does not fit into memory fails by itself; its neighbours get their outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from packhorse_shared.messages import ErrorCode, InputFailure, ModelFacts, WorkerLimits
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.budget import TokenBudget
from packhorse_worker.engine.grouping import Grouping
from packhorse_worker.engine.judging import judge
from packhorse_worker.engine.lanes.lane import Flight, How, Lane
from packhorse_worker.engine.outcome import ForwardOutputs, Outcome
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_LONGEST_MESSAGE = 256
_PLAINLY = How()


class Runner:
    """A model with its facts and limits, fed any number of inputs at a time. For one thread at a time."""

    def __init__(self, pipeline: Pipeline, lane: Lane, facts: ModelFacts, limits: WorkerLimits, grouping: Grouping) -> None:
        self.facts = facts
        self.limits = limits
        self.pipeline = pipeline
        self.lane = lane
        self._budget = TokenBudget(limits.max_num_tokens)
        self._grouping = grouping

    def run(self, inputs: Sequence[Input], how: How = _PLAINLY, *, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run inputs, all with the same extras; each gets its output or its failure.

        ``progress`` is told how many more inputs are done, or on their way. Raises DeviceLostError when the process must end.
        """
        return self.start(inputs, how, progress=progress).outcome()

    def start(self, inputs: Sequence[Input], how: How = _PLAINLY, *, progress: Callable[[int], None] | None = None) -> Started:
        """Send inputs on their way: a device that computes beside the host may still be busy with them then.

        As ``run``. What is started runs in the order in which it was started.
        """
        started = Started(inputs, by_token=self.pipeline.gives_tokens(per_token=how.per_token))
        lengths = [len(each.ids) for each in inputs]
        waiting = self._sound(started, lengths)
        waiting.sort(key=lengths.__getitem__, reverse=True)
        lengths = [lengths[index] for index in waiting]
        done = 0
        while done < len(waiting):
            count = self._grouping.cut(lengths[done : done + self.limits.max_batch_size], self._budget.tokens)
            self._launch(started, waiting[done : done + count], how)
            done += count
            if progress is not None:
                progress(count)
        return started

    def memory_bytes(self) -> int | None:
        """CUDA memory that this process's allocator holds; None on a CPU."""
        if self.pipeline.device.type != "cuda":
            return None
        # What torch's own function for this one number looks it up in is made flat and sorted first, which is most of its time.
        stats = torch.cuda.memory_stats_as_nested_dict(self.pipeline.device)
        return int(stats["reserved_bytes"]["all"]["current"])

    def _sound(self, started: Started, lengths: Sequence[int]) -> list[int]:
        """Indexes of the inputs that may reach the device; the others have failed. Looks at all of them at once first."""
        inputs = started.inputs
        if inputs and min(lengths) > 0 and max(lengths) <= self.facts.max_seq_len:
            ids = inputs[0].ids if len(inputs) == 1 else np.concatenate([each.ids for each in inputs])
            if ids.min() >= 0 and ids.max() < self.facts.vocabulary_rows:
                return list(range(len(inputs)))
        return [index for index, each in enumerate(inputs) if self._is_sound(started, index, each)]

    def _is_sound(self, started: Started, index: int, each: Input) -> bool:
        """Whether an input may reach the device at all: an id outside the table is fatal to a CUDA context."""
        rows = self.facts.vocabulary_rows
        if len(each) > self.facts.max_seq_len:
            started.fail(index, ErrorCode.INPUT_TOO_LONG, f"{len(each)} tokens, limit {self.facts.max_seq_len}")
        elif len(each) == 0 or int(each.ids.min()) < 0 or int(each.ids.max()) >= rows:
            segments = f", in segments 0 to {self.facts.segments - 1}" if self.facts.segments > 1 else ""
            started.fail(index, ErrorCode.FORWARD_FAILED, f"token ids must be one or more from 0 to {rows - 1}{segments}")
        else:
            return True
        return False

    def _launch(self, started: Started, group: list[int], how: How) -> None:
        """Run inputs in one forward, in halves when it fails, down to the guilty one."""
        try:
            flight = self.lane.launch([started.inputs[index] for index in group], how)
        except Exception as problem:
            code, message = judge(problem)
            error = f"{type(problem).__name__}: {first_line(problem)}"
        else:
            self._budget.succeeded()
            started.add(group, flight, self.facts)
            return
        # Outside the handler: the exception's traceback holds the tensors of the failed forward.
        if code is ErrorCode.OUT_OF_MEMORY:
            self._out_of_memory(started, group)
        if len(group) == 1:
            tokens = len(started.inputs[group[0]])
            log.warning("an input failed", extra={"code": code.value, "error": error, "tokens": tokens})
            started.fail(group[0], code, message, error)
            return
        middle = len(group) // 2
        self._launch(started, group[:middle], how)
        self._launch(started, group[middle:], how)

    def _out_of_memory(self, started: Started, group: list[int]) -> None:
        lengths = [len(started.inputs[index]) for index in group]
        area = sum(lengths) if self.pipeline.is_packed else len(group) * max(lengths)
        if len(group) > 1:
            self._budget.shrink(area)
        log.warning(
            "out of memory, going on in halves",
            extra={"inputs": len(group), "tokens": area, "token_budget": self._budget.tokens},
        )
        if self.pipeline.device.type == "cuda":
            torch.cuda.empty_cache()


class Started:
    """Inputs on their way, and what has become of each so far. What was started in one thread may be waited for in another."""

    def __init__(self, inputs: Sequence[Input], *, by_token: bool) -> None:
        self.inputs = inputs
        self._by_token = by_token
        self._flights: list[tuple[list[int], Flight]] = []
        self._facts: ModelFacts | None = None
        self._forwards: list[ForwardOutputs] = []
        self._failures: dict[int, InputFailure] = {}
        self._errors: dict[int, str] = {}

    def add(self, group: list[int], flight: Flight, facts: ModelFacts) -> None:
        """A forward was launched for these inputs."""
        self._flights.append((group, flight))
        self._facts = facts

    def fail(self, index: int, code: ErrorCode, message: str, error: str = "") -> None:
        """An input will have no output."""
        self._failures[index] = InputFailure(index, code, message[:_LONGEST_MESSAGE])
        if error:
            self._errors[index] = error

    def outcome(self) -> Outcome:
        """Wait for the outputs. Raises DeviceLostError when the process must end."""
        for group, flight in self._flights:
            try:
                outputs = flight.land()
            except Exception as problem:
                code, message = judge(problem)
                for index in group:
                    self.fail(index, code, message, f"{type(problem).__name__}: {first_line(problem)}")
            else:
                self._take(group, outputs)
        self._flights = []
        failures = [self._failures[index] for index in sorted(self._failures)]
        return Outcome(len(self.inputs), self._forwards, failures, self._errors)

    def _take(self, group: list[int], outputs: torch.Tensor) -> None:
        """Keep the outputs of a group; NaN or infinity fails its own input only."""
        forward = ForwardOutputs(group, outputs, [len(self.inputs[index]) for index in group] if self._by_token else None)
        self._forwards.append(forward)
        if _is_finite(outputs):
            return
        spoiled = [index for index, row in zip(group, forward.rows(), strict=True) if not _is_finite(row)]
        for index in spoiled:
            self.fail(index, ErrorCode.NON_FINITE_OUTPUT, "the model's output for this input is not finite")
        assert self._facts is not None
        code = ErrorCode.NON_FINITE_OUTPUT.value
        model = {"model": self._facts.name, "dtype": self._facts.dtype}
        log.warning("outputs that are not finite", extra={"code": code, **model, "inputs": len(spoiled), "of": len(group)})


def _is_finite(outputs: torch.Tensor) -> bool:
    """On the host by numpy, which takes a tenth of torch's time for a few."""
    return bool(np.isfinite(outputs.numpy()).all() if outputs.device.type == "cpu" else torch.isfinite(outputs).all())
