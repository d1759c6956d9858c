"""Runs forwards of growing sizes on a GPU at the start, and notes what they take: what ``tuning`` chooses from.

Workers that share a card measure when they please, maybe at the same time. So none runs a forward that could need more than its
own share of the memory, and of the times of a size the shortest counts, which neighbours disturbed least.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from packhorse_shared.messages import ErrorCode
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.judging import judge
from packhorse_worker.engine.memory import MOST_TOKENS
from packhorse_worker.engine.transformer import first_line
from packhorse_worker.engine.tuning import Sample, Samples

log = logging.getLogger(__name__)

LIMIT_S = 4.0
"""Time for all forwards. A larger one is not begun where it could end later."""
_SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, MOST_TOKENS)
_TYPICAL_TOKENS = 128
_FEWEST_LONG = 512
_TYPICAL_RUNS = 4
"""The first of which is not counted: it chooses kernels and fills the allocator."""


class Gauge(Protocol):
    """Measures what work takes on a device."""

    def __call__(self, work: Callable[[], object]) -> tuple[float, int]:
        """Seconds, and bytes at the most beside what was held before. Raises what the work raises."""

    def forget(self) -> None:
        """Give back memory that is only kept for later."""


class CudaGauge:
    """By the clock of the host with the device's work finished around it, and by the counters of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object]) -> tuple[float, int]:
        """See ``Gauge``."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began, torch.cuda.max_memory_allocated(self._device) - before

    def forget(self) -> None:
        """See ``Gauge``. The forwards of a lane run in another stream, which could not use it."""
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Limits:
    """What bounds the forwards that are tried."""

    max_batch_size: int
    longest: int
    """Tokens of the longest input."""
    vocabulary_rows: int
    share_bytes: int
    """Memory that this worker may take."""


@dataclass(frozen=True, order=True)
class Trial:
    """A forward to run: inputs of equal length."""

    tokens: int
    is_long: bool
    inputs: int

    @property
    def length(self) -> int:
        """Tokens of each input."""
        return self.tokens // self.inputs


def trials(limits: Limits) -> list[Trial]:
    """What is run, fewest tokens first: usual inputs, as many as a batch may have of them, and one input of up to the longest
    length, or some where that is short."""
    longest = min(limits.longest, MOST_TOKENS)
    reach = min(MOST_TOKENS, limits.max_batch_size * longest)
    typical = []
    for tokens in [each for each in _SIZES if each <= reach] or [reach]:
        inputs = min(limits.max_batch_size, -(-tokens // min(_TYPICAL_TOKENS, longest)))
        typical.append(Trial(tokens // inputs * inputs, is_long=False, inputs=inputs))
    long = [Trial(length, is_long=True, inputs=1) for length in _halves(longest)]
    if longest < _FEWEST_LONG:
        inputs = min(limits.max_batch_size, _FEWEST_LONG // longest)
        long = [Trial(inputs * longest, is_long=True, inputs=inputs)]
    # What the libraries set aside once and for all must not be taken for what a long input needs.
    return [typical[0], *sorted([*typical[1:], *long])]


def _halves(longest: int) -> Iterator[int]:
    yield longest
    while longest // 2 >= _FEWEST_LONG:
        longest //= 2
        yield longest


def measure(
    forward: Callable[[Sequence[Input]], object], limits: Limits, gauge: Gauge, clock: Callable[[], float] = time.monotonic
) -> Samples:
    """Run forwards for ``LIMIT_S`` at most, the smallest in any case; a failure ends them with what is known.

    Raises DeviceLostError when the process must end.
    """
    measuring = _Measuring(forward, limits, gauge, clock)
    ended = ""
    for trial in trials(limits):
        if not measuring.may_run(trial):
            continue
        try:
            measuring.run(trial)
        except Exception as problem:
            code, _ = judge(problem)
            ended = f"{'out of memory' if code is ErrorCode.OUT_OF_MEMORY else first_line(problem)} at {trial.tokens}"
            break
    gauge.forget()
    return Samples(measuring.taken[False], measuring.taken[True], ended)


class _Measuring:
    def __init__(
        self, forward: Callable[[Sequence[Input]], object], limits: Limits, gauge: Gauge, clock: Callable[[], float]
    ) -> None:
        self._forward = forward
        self._limits = limits
        self._gauge = gauge
        self._clock = clock
        self._ends = clock() + LIMIT_S
        self.taken: dict[bool, list[Sample]] = {False: [], True: []}
        """By whether the inputs are long."""

    def may_run(self, trial: Trial) -> bool:
        """Whether it ends in time and stays within the share of memory, by the last one of its kind, or of the other one where
        it is the first, if time and memory grow with the square of the tokens at worst, and shrink with none."""
        if not trial.is_long and not self.taken[False]:
            return True
        left_s = self._ends - self._clock()
        last = (self.taken[trial.is_long] or self.taken[False])[-1]
        growth = max(1.0, trial.tokens / last.tokens) ** 2
        runs = 1 if trial.is_long else _TYPICAL_RUNS
        return last.peak_bytes * growth <= self._limits.share_bytes and last.seconds * growth * runs <= left_s

    def run(self, trial: Trial) -> None:
        """Take a sample."""
        ids = np.arange(trial.length, dtype=np.int32) % self._limits.vocabulary_rows
        inputs = [Input(ids)] * trial.inputs
        readings = []
        for number in range(1 if trial.is_long else _TYPICAL_RUNS):
            reading = self._gauge(lambda: self._forward(inputs))
            if number > 0 or trial.is_long:
                readings.append(reading)
        seconds, peaks = zip(*readings, strict=True)
        self.taken[trial.is_long].append(Sample(trial.tokens, min(seconds), max(peaks)))
