"""``max_num_tokens auto`` on a card: measured in time, within the memory, and told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.card import DEVICE, encoder_of, ids_with, on_gpu, only_cuda, rows_of
from packhorse_worker.engine.measuring import LIMIT_S, CudaGauge, Limits, measure

pytestmark = [*on_gpu, only_cuda]

MIB = 1 << 20


def test_it_is_measured_told_and_enough_for_the_longest_input(slow_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), encoder_of(slow_model, max_num_tokens="auto", max_batch_size=32) as encoder:
        assert 512 <= encoder.limits.max_num_tokens <= 16_384
        assert encoder.max_seq_len == 512
        assert np.isfinite(rows_of(encoder, ids_with((512,) * 32)).numpy()).all()
    told = [each.getMessage() for each in caplog.records if "max_num_tokens auto" in each.getMessage()]
    assert len(told) == 1
    assert "measured 512 to " in told[0]


class Noting:
    """The gauge of a card, and the most memory that it saw."""

    def __init__(self, device: torch.device) -> None:
        self._gauge = CudaGauge(device)
        self.forget = self._gauge.forget
        self.peak = 0

    def __call__(self, work: Callable[[], object]) -> tuple[float, int]:
        seconds, peak = self._gauge(work)
        self.peak = max(self.peak, peak)
        return seconds, peak


@pytest.mark.parametrize("share", [150 * MIB, 100 << 30])
def test_measuring_takes_no_more_memory_or_time_than_it_may(slow_model: Path, share: int) -> None:
    device = torch.device(DEVICE)
    with encoder_of(slow_model, max_num_tokens=512, max_batch_size=32) as encoder:
        runner = encoder._runner
        assert runner is not None
        gauge = Noting(device)
        gauge.forget()
        held = torch.cuda.memory_reserved(device)
        began = time.monotonic()
        samples = measure(runner.pipeline.forward, Limits(32, 512, runner.facts.vocabulary_rows, share), gauge)
        assert time.monotonic() - began <= LIMIT_S + 2
        assert samples.ended == ""
        assert [each.tokens for each in samples.typical][:2] == [512, 768]
        assert 0 < gauge.peak <= share
        assert torch.cuda.memory_reserved(device) <= held + 64 * MIB
