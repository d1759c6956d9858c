"""CUDA graphs against eager runs of the same model: every family, every kind of head, and what must not happen at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.card import (
    FLOAT32_ONLY_ON_CPU,
    GRAPHS,
    IS_CUDA,
    SHAPES,
    TOLERANCE,
    TOLERANCES,
    batch_of,
    counting_replays,
    encoder_of,
    ids_with,
    known,
    on_gpu,
    only_cuda,
    rows_of,
    smallest_cosine,
)
from packhorse import EncodeError, Encoder
from packhorse_worker.engine.graphs.cuda import CudaRecorder
from packhorse_worker.engine.lanes.queues import CudaQueue
from tiny_families import FAMILIES, PADDED, build_family
from tiny_heads import HEADS, build_causal_reranker, build_cross_encoder, build_head, build_pooled_reranker
from tiny_models import build_l, build_n, build_t

pytestmark = on_gpu

DTYPES = ("float32", "bfloat16")
MAY_READ_BACK = {("qwen3-moe", "float32")}
"""Experts in float32: torch multiplies them one by one, and reads back how many tokens each one has."""
FIT_NO_GRAPH = ((2,) * 9, (60,) * 6, (60, 60, 60, 60, 20, 20))
"""More inputs, or more tokens, than a forward may have: several forwards, some of them of no graph's size."""


@dataclass(frozen=True)
class Pair:
    """One model, eager and with graphs."""

    name: str
    dtype: str
    eager: Encoder
    graphs: Encoder

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.name, TOLERANCE)

    def assert_same(self, lengths: tuple[int, ...], **options: Any) -> None:
        ids = ids_with(lengths)
        found, wanted = (rows_of(each, ids, **options) for each in (self.graphs, self.eager))
        assert found.shape == wanted.shape
        assert bool(torch.isfinite(found).all())
        if self.dtype == "float32":
            assert float((found - wanted).abs().max()) <= self.tolerance
        elif found.shape[1] >= 16:
            assert smallest_cosine(found, wanted) >= 0.999
        else:  # of a few logits the angle says little
            assert float((found - wanted).abs().max()) <= 0.03 * max(1.0, float(wanted.abs().max()))


@pytest.fixture(scope="module", params=[(name, dtype) for name in FAMILIES for dtype in DTYPES], ids="-".join)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Wide weights in float32, so that a mistake shows; in bfloat16 such as models have, so that rounding does not."""
    name, dtype = request.param
    known(name)
    if dtype == "bfloat16" and name in FLOAT32_ONLY_ON_CPU:
        pytest.skip("transformers computes it in float32 in some places, and fails in bfloat16")
    folder = build_family(
        tmp_path_factory.mktemp("family") / name, name, **({} if dtype == "float32" else {"initializer_range": 0.02})
    )
    with encoder_of(folder, dtype=dtype) as eager, encoder_of(folder, graphs=True, dtype=dtype) as graphs:
        yield Pair(name, dtype, eager, graphs)


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_a_replay_gives_what_the_eager_forward_gives(
    family: Pair, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that reads memory which something else was put into, or what the last batch left."""
    with counting_replays(monkeypatch) as replays:
        family.assert_same(lengths)
    if (family.name, family.dtype) not in MAY_READ_BACK:
        assert (replays.count > 0) == (IS_CUDA and family.name not in PADDED)


@pytest.mark.parametrize("lengths", FIT_NO_GRAPH, ids=lambda lengths: f"{len(lengths)} inputs, {sum(lengths)} tokens")
def test_what_fits_no_graph_has_the_same_result(family: Pair, lengths: tuple[int, ...]) -> None:
    family.assert_same(lengths)


@pytest.mark.parametrize("place", [0, 1, 4])
def test_neighbours_and_dummies_make_no_difference(family: Pair, place: int) -> None:
    """Dummies, what is behind the last input, or neighbours that are seen by an input."""
    own = ids_with((7,), seed=1)
    others = ids_with((3, 30, 7, 12), seed=2)
    alone = rows_of(family.graphs, own)[0]
    in_company = rows_of(family.graphs, [*others[:place], *own, *others[place:]])[place]
    if family.dtype == "float32":
        assert float((alone - in_company).abs().max()) <= family.tolerance
    else:
        assert smallest_cosine(alone[None], in_company[None]) >= 0.999


Build = Callable[[Path], Path]
KINDS: dict[str, Build] = {
    **{name: lambda folder, name=name: build_head(folder, name) for name in HEADS},  # type: ignore[misc]
    "cross-encoder": lambda folder: build_cross_encoder(folder, "up to 5.3"),
    "causal reranker": build_causal_reranker,
    "pooled reranker": build_pooled_reranker,
    **{
        pooling: lambda folder, pooling=pooling: build_t(folder, pooling=(pooling,))  # type: ignore[misc]
        for pooling in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    },
    "two poolings": lambda folder: build_t(folder, pooling=("mean", "max"), normalize=False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head(tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = KINDS[kind](tmp_path / "model")
    padded = {f"{name}-classifier" for name in PADDED}
    with encoder_of(folder, dtype=dtype) as eager, encoder_of(folder, graphs=True, dtype=dtype) as graphs:
        pair = Pair(kind, dtype, eager, graphs)
        with counting_replays(monkeypatch) as replays:
            for lengths in SHAPES:
                pair.assert_same(lengths)
        assert (replays.count >= len(SHAPES)) == (IS_CUDA and kind not in padded)


@pytest.fixture(scope="module", params=[("bert", "float32"), ("bert", "bfloat16"), ("qwen3", "bfloat16")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """An encoder and a decoder; in bfloat16 by the kernels for many lengths, in float32 by SDPA."""
    name, dtype = request.param
    folder = (build_t if name == "bert" else build_l)(tmp_path_factory.mktemp("served") / name)
    with encoder_of(folder, dtype=dtype) as eager, encoder_of(folder, graphs=True, dtype=dtype) as graphs:
        yield Pair(name, dtype, eager, graphs)


def test_nothing_is_captured_at_run_time(served: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of a new size waits for a capture, and memory grows with every one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("captured at run time")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    for lengths in (*SHAPES, *FIT_NO_GRAPH):
        served.assert_same(lengths)


@only_cuda
def test_nothing_is_allocated_at_run_time(served: Pair) -> None:
    """Memory is asked of the driver, or of the allocator, for every batch."""
    batches = [ids_with(lengths) for lengths in SHAPES]
    before = _run_and_count(served.graphs, batches, times=2)
    after = _run_and_count(served.graphs, batches, times=5)
    assert after == before


def _run_and_count(encoder: Encoder, batches: list[Any], times: int) -> dict[str, int]:
    for _ in range(times):
        for ids in batches:
            assert batch_of(encoder, ids)().failures == []
    names = ("num_device_alloc", "num_device_free", "segment.all.allocated", "allocation.all.allocated")
    found = torch.cuda.memory_stats()
    return {name: int(found[name]) for name in names if name in found}


@only_cuda
@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_a_batch_is_started_without_waiting_for_the_device(served: Pair, way: str) -> None:
    """One value that is read back, and the host stands still until the device is done with all before."""
    encoder = getattr(served, way)
    for lengths in SHAPES:
        ids = ids_with(lengths)
        batch_of(encoder, ids)()
        torch.cuda.set_sync_debug_mode("error")
        try:
            finish = batch_of(encoder, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert finish().failures == []


@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_two_batches_under_way_get_their_own_rows(served: Pair, way: str) -> None:
    """The second batch is written over the first one's inputs, or its outputs over the first one's."""
    encoder = getattr(served, way)
    batches = [ids_with(lengths, seed=seed) for seed, lengths in enumerate(SHAPES * 3)]
    wanted = [batch_of(encoder, ids)().values.copy() for ids in batches]
    before: Any = None
    for number, ids in enumerate(batches):
        finish = batch_of(encoder, ids)
        if before is not None:
            assert abs(before().values - wanted[number - 1]).max() <= 1e-3
        before = finish
    assert abs(before().values - wanted[-1]).max() <= 1e-3


def test_results_stay_as_they_were_while_later_batches_run(served: Pair) -> None:
    """Rows that point into memory which the next batch is written to."""
    kept = [batch_of(served.graphs, ids_with(lengths, seed=1))() for lengths in SHAPES[:4]]
    copies = [each.values.copy() for each in kept]
    for lengths in SHAPES:
        batch_of(served.graphs, ids_with(lengths, seed=2))()
    assert all((each.values == copy).all() for each, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_outputs_that_stay_on_the_device(served: Pair, way: str) -> None:
    encoder = getattr(served, way)
    ids = ids_with((9, 2, 30, 7))
    wanted = rows_of(encoder, ids)
    first = encoder.encode(ids, copy_logits_to_host=False)
    encoder.encode(ids_with((9, 2, 30, 7), seed=8), copy_logits_to_host=False)
    assert {each.logits.device.type for each in first} == {encoder.device.type}
    assert float((torch.stack([each.logits.cpu() for each in first]) - wanted).abs().max()) <= 1e-6


def test_a_row_for_each_token(served: Pair) -> None:
    served.assert_same((9, 2, 30, 7), batch_indexed_model_output=False)


@pytest.mark.parametrize("graphs", [True, False])
def test_an_input_that_is_not_a_number_fails_alone(tmp_path: Path, *, graphs: bool) -> None:
    """Not-a-number that spreads: in its own batch, and to the next one in the same memory."""
    others = ids_with((9, 2, 30), seed=3)
    spoiled = ids_with((12,), seed=4)[0]
    spoiled[5] = 99
    with encoder_of(build_n(tmp_path / "n"), graphs=graphs) as encoder:
        wanted = rows_of(encoder, others)
        for _ in range(3):
            with pytest.raises(EncodeError) as raised:
                encoder.encode([others[0], spoiled, *others[1:]])
            assert [each.index for each in raised.value.failures] == [1]
            found = [each.logits.cpu() for each in raised.value.outputs if each is not None]
            assert float((torch.stack(found) - wanted).abs().max()) <= 1e-3
            assert float((rows_of(encoder, others) - wanted).abs().max()) <= 1e-3


@pytest.mark.parametrize("graphs", [True, False])
def test_only_exact_sizes_run_in_graphs_with_padding_off(
    t_model: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool
) -> None:
    """A batch of another size is filled up although that was switched off."""
    config = GRAPHS.to_dict() | {"enable_padding": False} if graphs else None
    with Encoder(t_model, dtype="float32", device="cuda" if IS_CUDA else "cpu", cuda_graph_config=config) as encoder:
        for lengths, is_exact in (
            ((16,), True),
            ((16, 6) + (7,) * 6, True),
            ((8,) * 7 + (16,), False),
            ((15,), False),
            ((9, 7), False),
        ):
            with counting_replays(monkeypatch) as replays:
                rows_of(encoder, ids_with(lengths))
            assert (replays.count == 1) == (graphs and is_exact and IS_CUDA)


# The last tests of all: what they may leave behind would fail the others.


def _read_back(values: torch.Tensor) -> torch.Tensor:
    return values.cpu()


def _wait_for_all(values: torch.Tensor) -> torch.Tensor:
    """Which torch does not look at, and CUDA ends the capture for."""
    torch.cuda.synchronize()
    return values


@only_cuda
@pytest.mark.parametrize("refused", [_read_back, _wait_for_all])
def test_a_capture_that_is_refused_leaves_everything_as_it_was(
    served: Pair, refused: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """torch takes the capture for still under way: no memory is given back, no random number made; its stream stays current."""
    device = served.graphs.device
    queue = CudaQueue(device)
    recorder = CudaRecorder(queue, device)
    ones = torch.ones(3, device=device)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="captur"):
        recorder.record(lambda: refused(ones))
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert bool((torch.rand(3, device=device) < 1).all())
    recorder.run(lambda: ones * 2)
    assert recorder.replay(recorder.record(lambda: ones * 2)).tolist() == [2, 2, 2]
    served.assert_same((9, 2, 30, 7))
