"""``--max_num_tokens auto``: what is measured, and what is chosen from it. No GPU: a device of formulas, and memory counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from models.test_memory_bound import LiveBytes
from packhorse import Encoder
from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine import limits as limits_module
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.model_folder import read_model_folder
from packhorse_worker.engine.load import load_runner
from packhorse_worker.engine.measuring import LIMIT_S, CudaGauge, Limits, measure, trials
from packhorse_worker.engine.memory import SHARE_OF_FREE, free_bytes
from packhorse_worker.engine.tuning import Sample, Samples, choose, line, most_that_fit
from reference import CPU, runner_of
from tiny_families import build_family
from tiny_models import build_t, write_json

MIB = 1 << 20


@dataclass
class FormulaDevice:
    """A device whose forwards take what formulas say; both gauge and clock."""

    fixed: int = 0
    per_token: int = MIB // 8
    per_square: float = 0.0
    seconds_per_token: float = 1e-6
    seconds_per_forward: float = 0.002
    has_bytes: float = float("inf")
    noise: Callable[[], float] = lambda: 1.0
    now: float = 100.0
    ran: list[list[int]] = field(default_factory=list)
    peak: int = 0
    forgot: int = 0

    def forward(self, inputs: Sequence[Input]) -> None:
        lengths = [len(each) for each in inputs]
        self.ran.append(lengths)
        self.peak = self.bytes_of(lengths)
        if self.peak > self.has_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.now += self.seconds_of(lengths)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        return int(self.fixed + self.per_token * sum(lengths) + self.per_square * sum(each * each for each in lengths))

    def seconds_of(self, lengths: Sequence[int]) -> float:
        return self.seconds_per_forward + self.seconds_per_token * sum(lengths)

    def __call__(self, work: Callable[[], object]) -> tuple[float, int]:
        began = self.now
        work()
        return (self.now - began) * self.noise(), self.peak

    def forget(self) -> None:
        self.forgot += 1

    def measure(self, share_bytes: int, *, longest: int = 512, max_batch_size: int = 32) -> Samples:
        return measure(self.forward, Limits(max_batch_size, longest, 1000, share_bytes), self, lambda: self.now)


def samples_of(*taken: tuple[int, float, int]) -> list[Sample]:
    return [Sample(*each) for each in taken]


# ---- what is run ----


@pytest.mark.parametrize("longest", [1, 7, 64, 77, 256, 511, 512, 514, 1000, 1024, 8192, 16_384, 40_000])
@pytest.mark.parametrize("max_batch_size", [1, 3, 32, 1024])
def test_trials_are_batches_that_can_be(longest: int, max_batch_size: int) -> None:
    found = trials(Limits(max_batch_size, longest, 1000, MIB))
    assert not found[0].is_long
    assert [each.tokens for each in found[1:]] == sorted(each.tokens for each in found[1:])
    for each in found:
        assert 1 <= each.inputs <= max_batch_size
        assert each.tokens == each.inputs * each.length
        assert 1 <= each.length <= min(longest, 16_384)
        assert each.tokens <= 16_384
    assert max(each.length for each in found if each.is_long) == min(longest, 16_384)
    typical = [each.tokens for each in found if not each.is_long]
    assert len(set(typical)) == len(typical)
    reach = min(16_384, max_batch_size * longest)
    assert reach >= typical[-1] > reach / 1.6


def test_usual_inputs_are_many_and_short_and_one_is_the_longest() -> None:
    found = trials(Limits(32, 4096, 1000, MIB))
    assert [(each.inputs, each.length) for each in found if not each.is_long] == [
        (4, 128), (6, 128), (8, 128), (12, 128), (16, 128), (24, 128), (32, 128), (32, 192), (32, 256), (32, 384), (32, 512),
    ]  # fmt: skip
    assert [(each.inputs, each.length) for each in found if each.is_long] == [(1, 512), (1, 1024), (1, 2048), (1, 4096)]


def test_ids_are_in_the_table() -> None:
    highest = []
    device = FormulaDevice()

    def forward(inputs: Sequence[Input]) -> None:
        highest.extend(int(each.ids.max()) for each in inputs)
        device.forward(inputs)

    measure(forward, Limits(32, 512, 20, 100 << 30), device, lambda: device.now)
    assert max(highest) == 19


def test_all_sizes_are_run_where_there_is_room_and_time() -> None:
    device = FormulaDevice()
    samples = device.measure(100 << 30, longest=4096)
    assert [each.tokens for each in samples.typical] == [512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384]
    assert [each.tokens for each in samples.long] == [512, 1024, 2048, 4096]
    assert samples.ended == ""
    assert samples.typical[0] == Sample(512, pytest.approx(0.002512), 512 * device.per_token)
    assert device.forgot == 1


def test_of_the_times_of_a_size_the_shortest_counts() -> None:
    times = iter([9.0, 3.0, 1.0, 2.0] + [1.0] * 100)
    device = FormulaDevice(noise=lambda: next(times))
    assert device.measure(100 << 30).typical[0].seconds == pytest.approx(0.002512)


@given(
    per_token=st.integers(1000, MIB),
    per_square=st.floats(0, 500),
    share=st.integers(MIB, 64 << 30),
    longest=st.integers(1, 16_384),
)
def test_no_forward_but_the_smallest_takes_more_than_the_share(
    per_token: int, per_square: float, share: int, longest: int
) -> None:
    device = FormulaDevice(per_token=per_token, per_square=per_square)
    device.measure(share, longest=longest)
    first = device.ran[0]
    for lengths in device.ran:
        assert lengths == first or len(lengths) == 1 or device.bytes_of(lengths) <= share
        if len(lengths) == 1 and lengths != first:
            # The first long one is told from usual inputs, whose attention takes less; each further one from that before it.
            assert device.bytes_of(lengths) <= share or lengths[0] < 1024


@given(seconds_per_token=st.floats(1e-8, 1e-2), longest=st.integers(1, 16_384))
@example(seconds_per_token=0.00175, longest=257)  # a long input of fewer tokens than the batch by which it is told
def test_measuring_ends_in_time(seconds_per_token: float, longest: int) -> None:
    device = FormulaDevice(seconds_per_token=seconds_per_token)
    began = device.now
    samples = device.measure(1 << 40, longest=longest)
    smallest = 4 * device.seconds_of(device.ran[0])
    assert device.now - began <= max(LIMIT_S, smallest) + 1e-6
    assert samples.typical
    assert samples.ended == ""


def test_out_of_memory_ends_the_measuring_with_what_is_known() -> None:
    """A neighbour has taken what looked free."""
    device = FormulaDevice(has_bytes=3000 * (MIB // 8))
    samples = device.measure(100 << 30, longest=8192)
    assert [each.tokens for each in samples.typical] == [512, 768, 1024, 1536, 2048]
    assert [each.tokens for each in samples.long] == [512, 1024, 2048]
    assert samples.ended == "out of memory at 3072"
    assert device.forgot == 1
    choice = choose(samples, 100 << 30, 8192)
    assert choice.tokens >= 2048
    assert "measured 512 to 2048, then out of memory at 3072" in choice.reason


def test_out_of_memory_at_once_leaves_nothing() -> None:
    assert FormulaDevice(has_bytes=0).measure(100 << 30) == Samples([], [], "out of memory at 512")


def test_a_model_that_fails_ends_the_measuring_and_a_lost_device_the_process() -> None:
    device = FormulaDevice()

    def fail(problem: Exception) -> Samples:
        def forward(inputs: Sequence[Input]) -> None:
            if len(inputs) > 6:
                raise problem
            device.forward(inputs)

        return measure(forward, Limits(32, 512, 1000, 100 << 30), device, lambda: device.now)

    samples = fail(ValueError("too many\nfor me"))
    assert [each.tokens for each in samples.typical] == [512, 768]
    assert samples.ended == "too many at 1024"
    with pytest.raises(DeviceLostError):
        fail(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_the_gauge_of_a_gpu_waits_for_the_device_and_counts_from_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    device = torch.device("cuda:1")
    answers = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 100, "max_memory_allocated": 175}

    def stub(name: str) -> Callable[[torch.device], Any]:
        def call(given: torch.device) -> Any:
            assert given == device
            calls.append(name)
            return answers[name]

        return call

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, stub(name))
    seconds, peak = CudaGauge(device)(lambda: calls.append("work"))
    assert (seconds > 0, peak) == (True, 75)
    assert calls == [
        "synchronize",
        "reset_peak_memory_stats",
        "memory_allocated",
        "work",
        "synchronize",
        "max_memory_allocated",
    ]


# ---- what is chosen ----


def test_the_smallest_of_those_that_are_nearly_as_fast() -> None:
    """Latency: a GPU that is busy with 2,048 tokens gains nothing by 16,384."""
    typical = samples_of((512, 1.0, 1), (1024, 1.5, 1), (2048, 2.5, 1), (4096, 4.9, 1), (8192, 9.6, 1))
    assert choose(Samples(typical), 1 << 30, 512).tokens == 2048
    assert choose(Samples(typical[:4]), 1 << 30, 512).tokens == 2048
    assert choose(Samples(typical[:2]), 1 << 30, 512).tokens == 1024
    assert choose(Samples(samples_of((512, 1.0, 1), (1024, 1.95, 1))), 1 << 30, 512).tokens == 512


def test_what_is_faster_but_does_not_fit_does_not_count() -> None:
    typical = samples_of((512, 1.0, 512), (1024, 1.0, 1024), (2048, 1.0, 2048), (4096, 1.0, 4096))
    assert [choose(Samples(typical), bytes_, 512).tokens for bytes_ in (10, 600, 2047, 2048, 4095, 1 << 20)] == [
        512, 512, 1024, 2048, 2048, 4096,
    ]  # fmt: skip


def test_one_input_of_the_longest_length_has_room_where_there_is_any() -> None:
    typical = samples_of((512, 1.0, 512), (1024, 2.0, 1024))
    long = samples_of((512, 1.0, 512), (1024, 1.0, 1024), (2048, 1.0, 2048), (4096, 1.0, 4096), (8190, 1.0, 8190))
    assert choose(Samples(typical), 1 << 20, 300).tokens == 512
    choice = choose(Samples(typical, long), 1 << 20, 8190)
    assert choice.tokens == 8192
    assert choice.reason.endswith("one input may have 8190")
    cut = choose(Samples(typical, long), 3000, 8190)
    assert 2048 <= cut.tokens <= 3000
    assert cut.reason.endswith(f"one input may have {cut.tokens}")
    assert choose(Samples(typical), 1 << 30, 1 << 20).tokens == 16_384


def test_attention_that_grows_with_the_square_bounds_the_longest() -> None:
    """SDPA's last resort: usual inputs say nothing of it."""
    device = FormulaDevice(per_square=100)
    budget = 1 << 30
    choice = choose(device.measure(2 * budget, longest=8192), budget, 8192)
    assert device.bytes_of([choice.tokens]) <= budget < device.bytes_of([8192])
    assert choice.tokens > 0.6 * next(each for each in range(8192) if device.bytes_of([each]) > budget)


def test_the_line_is_not_moved_by_one_odd_sample() -> None:
    exact = [(tokens, 1.0, 1000 + 10 * tokens) for tokens in (512, 1024, 2048, 4096, 8192)]
    assert line(samples_of(*exact)) == (1000, 10)
    exact[2] = (2048, 1.0, 1000 + 20 * 2048)
    fixed, slope = line(samples_of(*exact))
    assert slope == pytest.approx(10, rel=0.3)
    assert all(fixed + slope * tokens >= peak for tokens, _, peak in exact)
    assert line(samples_of((512, 1.0, 5120))) == (0, 10)
    assert line(samples_of((512, 1.0, 100), (1024, 1.0, 50))) == (100, 0)


SIZES = (512, 768, 1024, 2048, 4096, 8192, 16_384)
ANY_SAMPLES = st.builds(
    lambda typical, long, ended: Samples(
        [Sample(tokens, *each) for tokens, each in zip(SIZES, typical, strict=False)],
        [Sample(tokens, *each) for tokens, each in zip(SIZES, long, strict=False)],
        ended,
    ),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 32)), min_size=1, max_size=len(SIZES)),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1 << 32)), max_size=len(SIZES)),
    st.sampled_from(["", "out of memory at 9"]),
)


@given(samples=ANY_SAMPLES, budget=st.integers(0, 1 << 36), more=st.integers(0, 1 << 36), longest=st.integers(1, 1 << 20))
def test_whatever_was_measured_the_choice_is_within_bounds_and_grows_with_the_memory(
    samples: Samples, budget: int, more: int, longest: int
) -> None:
    less_tokens, more_tokens = (choose(samples, each, longest).tokens for each in (budget, budget + more))
    assert 512 <= less_tokens <= more_tokens <= 16_384
    assert less_tokens % 64 == 0
    assert less_tokens <= max(512, most_that_fit(samples, budget, longest))
    for each in (*samples.typical, *samples.long):
        if each.peak_bytes > budget:
            assert less_tokens <= max(512, each.tokens)


@given(
    fixed=st.integers(0, 64 * MIB),
    per_token=st.integers(1000, MIB),
    per_square=st.floats(0, 500),
    share=st.integers(64 * MIB, 100 << 30),
    longest=st.integers(1, 16_384),
    max_batch_size=st.sampled_from([1, 4, 32, 256]),
    seconds_per_token=st.floats(1e-8, 1e-3),
)
def test_what_is_chosen_fits(
    *,
    fixed: int,
    per_token: int,
    per_square: float,
    share: int,
    longest: int,
    max_batch_size: int,
    seconds_per_token: float,
) -> None:
    device = FormulaDevice(fixed, per_token, per_square, seconds_per_token)
    samples = device.measure(share, longest=longest, max_batch_size=max_batch_size)
    budget = int(share * SHARE_OF_FREE)
    tokens = choose(samples, budget, longest).tokens
    if tokens > 512:
        length = min(longest, tokens)
        for lengths in ([length] * (tokens // length), [min(128, length)] * (tokens // min(128, length))):
            assert device.bytes_of(lengths[:max_batch_size]) <= 1.001 * budget


# ---- in a loaded model ----


class MemoryGauge:
    """Counts the bytes of a CPU's tensors."""

    def __call__(self, work: Callable[[], object]) -> tuple[float, int]:
        with LiveBytes() as live:
            work()
        return 1e-4, live.peak

    def forget(self) -> None:
        """Nothing is kept."""


def test_a_real_model_measured_stays_within_its_budget(tmp_path: Path) -> None:
    runner = runner_of(build_t(tmp_path / "t", max_position_embeddings=512))
    forward = runner.pipeline.forward
    samples = measure(forward, Limits(8, 512, runner.facts.vocabulary_rows, 1 << 30), MemoryGauge(), clock=lambda: 0.0)
    assert samples.ended == ""
    assert [each.tokens for each in samples.typical] == [512, 768, 1024, 1536, 2048, 3072, 4096]
    fixed, slope = line(samples.typical)
    assert slope > 32 * 4, "at least a vector of 32 float32 values"
    budget = int(fixed + slope * 2100)
    choice = choose(samples, budget, 512)
    assert choice.tokens == 2048
    inputs = [Input(np.arange(256, dtype=np.int32) % 100)] * 8
    assert MemoryGauge()(lambda: forward(inputs))[1] <= budget


def test_on_a_cpu_the_rule_decides_and_nothing_is_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "measure", lambda *given: pytest.fail("measured"))
    with caplog.at_level(logging.INFO), Encoder(build_t(tmp_path / "t"), max_num_tokens="auto") as encoder:
        assert encoder.limits.max_num_tokens == 16_384
        assert encoder.max_seq_len == 64
    told = [record.getMessage() for record in caplog.records if "max_num_tokens auto" in record.getMessage()]
    assert told == ["max_num_tokens auto: 16384 tokens (by rule from free memory)"]


def auto_runner(folder: Path) -> Any:
    model = ModelSettings()
    return load_runner(read_model_folder(folder, model), "m", model, BatchingSettings(max_num_tokens="auto"), CPU)


def test_workers_with_different_room_serve_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 declares no longest input: the free memory became that, and so a part of the fingerprint."""
    folder = build_family(tmp_path / "t5", "t5")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["model_max_length"]
    write_json(folder / "tokenizer_config.json", tokenizer)
    large = auto_runner(folder)
    monkeypatch.setattr(limits_module, "free_bytes", lambda device, workers: 20 * MIB)
    small = auto_runner(folder)
    assert 512 <= small.limits.max_num_tokens < large.limits.max_num_tokens
    assert small.facts == large.facts
    assert small.facts.max_seq_len == 16_384


def test_too_little_room_for_the_longest_input_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits_module, "free_bytes", lambda device, workers: 0)
    folder = build_t(tmp_path / "t", max_position_embeddings=2048)
    with caplog.at_level(logging.WARNING):
        assert auto_runner(folder).limits.max_num_tokens == 512
    told = [record for record in caplog.records if "is the limit for one input" in record.getMessage()]
    assert [(each.__dict__["max_num_tokens"], each.__dict__["max_seq_len"]) for each in told] == [(512, 2048)]


@pytest.mark.parametrize(
    ("free", "reserved", "workers", "expected"),
    [
        (70, 5, 1, 70),
        (70, 5, 4, 15),  # the first of four: the others have not loaded yet
        (60, 5, 4, 15),  # the last of four
        (30, 5, 4, 7),  # a stranger holds the rest
        (1, 30, 4, 0),
    ],
)
def test_a_worker_counts_on_its_part_of_a_card(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, workers: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    assert free_bytes(torch.device("cuda"), workers) == expected
