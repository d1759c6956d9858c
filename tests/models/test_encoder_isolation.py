"""No input harms another: failing forwards are halved down to the guilty input, memory is given back in halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from packhorse_shared.messages import EncodeOptions, ErrorCode, ModelFacts, WorkerLimits
from packhorse_worker.backend import DeviceLostError, EncodedBatch
from packhorse_worker.engine.encoder import Encoder, TokenBudget

Inputs = Sequence[NDArray[np.int32]]


class FakePipeline:
    """Gives each input's sum as its vector, unless ``trouble`` raises for the inputs of a forward."""

    device = torch.device("cpu")

    def __init__(self, trouble: Callable[[Inputs], None]) -> None:
        self.areas: list[int] = []
        self._trouble = trouble

    def forward(self, ids: Inputs, prompt_tokens: Sequence[int]) -> NDArray[np.float32]:
        self.areas.append(len(ids) * max(len(each) for each in ids))
        self._trouble(ids)
        return np.array([[each.sum(), 1.0] for each in ids], dtype=np.float32)


def encoder_with(trouble: Callable[[Inputs], None], max_num_tokens: int = 64) -> tuple[Encoder, FakePipeline]:
    facts = ModelFacts(
        name="fake", task="embedding", dimension=2, max_seq_len=50, dtype="float32", vocabulary_rows=128, fingerprint="f"
    )
    pipeline = FakePipeline(trouble)
    return Encoder(pipeline, facts, WorkerLimits(32, max_num_tokens)), pipeline  # type: ignore[arg-type] # a stand-in


def inputs(*rows: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(row, dtype=np.int32) for row in rows]


def encode(encoder: Encoder, ids: Inputs) -> tuple[EncodedBatch, list[tuple[int, ErrorCode]]]:
    outcome = encoder.encode(ids, [EncodeOptions()] * len(ids))
    return outcome, [(failure.index, failure.code) for failure in outcome.failures]


def nothing(_ids: Inputs) -> None:
    """No trouble."""


def raise_on(token: int, error: Exception) -> Callable[[Inputs], None]:
    def trouble(ids: Inputs) -> None:
        if any(token in each for each in ids):
            raise error

    return trouble


def test_the_guilty_inputs_fail_alone() -> None:
    encoder, _ = encoder_with(raise_on(99, ValueError("about the input's text")))
    outcome, failures = encode(encoder, inputs([1], [99], [2, 3], [4], [5], [6], [99, 1], [7]))
    assert failures == [(1, ErrorCode.FORWARD_FAILED), (6, ErrorCode.FORWARD_FAILED)]
    assert outcome.row_values == [2, 0, 2, 2, 2, 2, 0, 2]
    assert outcome.values.reshape(-1, 2)[:, 0].tolist() == [1, 5, 4, 5, 6, 7]
    assert "text" not in outcome.failures[0].message


def test_padded_areas_stay_within_the_budget_and_rows_keep_their_order() -> None:
    encoder, pipeline = encoder_with(nothing)
    lengths = [1, 40, 3, 20, 20, 2, 50, 7, 1, 33]
    outcome, failures = encode(encoder, [np.full(length, 1, dtype=np.int32) for length in lengths])
    assert failures == []
    assert outcome.values.reshape(-1, 2)[:, 0].tolist() == lengths
    assert max(pipeline.areas) <= 64
    assert sum(pipeline.areas) < 1.5 * sum(lengths)


def test_an_input_over_the_budget_runs_alone() -> None:
    encoder, pipeline = encoder_with(nothing, max_num_tokens=8)
    outcome, failures = encode(encoder, inputs([1] * 20, [2], [3]))
    assert (failures, outcome.row_values) == ([], [2, 2, 2])
    assert pipeline.areas == [20, 2]


@pytest.mark.parametrize("row", [[128], [-1], []])
def test_ids_outside_the_table_never_reach_the_device(row: list[int]) -> None:
    encoder, pipeline = encoder_with(nothing)
    outcome, failures = encode(encoder, inputs([1], row))
    assert failures == [(1, ErrorCode.FORWARD_FAILED)]
    assert outcome.row_values == [2, 0]
    assert pipeline.areas == [1]


def test_an_input_over_the_limit_fails_alone() -> None:
    encoder, _ = encoder_with(nothing)
    outcome, failures = encode(encoder, inputs([1] * 51, [1] * 50))
    assert failures == [(0, ErrorCode.INPUT_TOO_LONG)]
    assert "51" in outcome.failures[0].message
    assert "50" in outcome.failures[0].message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_out_of_memory_is_halved_and_only_what_never_fits_fails(error: Exception) -> None:
    def trouble(ids: Inputs) -> None:
        if len(ids) * max(len(each) for each in ids) > 16:
            raise error

    encoder, pipeline = encoder_with(trouble)
    outcome, failures = encode(encoder, inputs([1] * 20, *[[1] * 8] * 8, [1]))
    assert failures == [(0, ErrorCode.OUT_OF_MEMORY)]
    assert outcome.row_values == [0, *[2] * 9]
    pipeline.areas.clear()
    encode(encoder, inputs(*[[1] * 8] * 8))
    assert max(pipeline.areas) <= 32, "the budget stays small for a while"


def test_the_budget_comes_back() -> None:
    budget = TokenBudget(1000)
    budget.shrink(600)
    assert budget.tokens == 300
    budget.shrink(2)
    assert budget.tokens == 1
    for _ in range(64 * 10):
        budget.succeeded()
    assert budget.tokens == 1000


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_sticky_error_ends_the_worker(error: Exception) -> None:
    encoder, _ = encoder_with(raise_on(99, error))
    with pytest.raises(DeviceLostError, match="CUDA error"):
        encoder.encode(inputs([1], [99]), [EncodeOptions()] * 2)


def test_a_batch_without_any_row() -> None:
    encoder, _ = encoder_with(raise_on(1, ValueError("no")))
    outcome, failures = encode(encoder, inputs([1], [1]))
    assert len(failures) == 2
    assert outcome.values.tolist() == []
    assert outcome.row_values == [0, 0]
