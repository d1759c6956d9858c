"""Graphs are recordings: what a forward did with one batch, done again with another, gives what the forward gives for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse_shared.extra_inputs import EncodeExtraInputSpec
from packhorse_worker.engine import load
from packhorse_worker.engine.batch import Extra, Input
from packhorse_worker.engine.files.modules import Pooling
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.heads import Embedding
from packhorse_worker.engine.lanes.lane import QueuedLane
from packhorse_worker.engine.packing import Shape, layout_of
from packhorse_worker.engine.pipeline import Pipeline, Sizes
from packhorse_worker.engine.runner import Runner
from recorded_graphs import CONFIG, LENGTHS, WAYS, check_batches, check_lane, inputs_of, maker_of
from reference import runner_of
from simulated_device import Watch
from tiny_families import FAMILIES, PADDED, build_family
from tiny_heads import HEADS, build_causal_reranker, build_head
from tiny_models import HIDDEN, build_t, build_x


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_of(build_t(tmp_path_factory.mktemp("graphs") / "t"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in PADDED])
def test_a_replay_gives_what_the_eager_forward_gives(tmp_path: Path, family: str, way: str) -> None:
    runner = runner_of(build_family(tmp_path / family, family))
    assert runner.pipeline.is_packed
    made = maker_of(runner, WAYS[way])
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    check_batches(runner, made, graphs, [inputs_of(lengths, seed) for seed, lengths in enumerate(LENGTHS)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", [*(name for name in HEADS if not name.startswith(("mpnet", "deberta"))), "yes or no"])
def test_every_head_in_a_graph(tmp_path: Path, head: str, way: str) -> None:
    """Rows of filler or of dummies that come out as logits."""
    folder = build_causal_reranker(tmp_path / "m") if head == "yes or no" else build_head(tmp_path / "m", head)
    runner = runner_of(folder)
    made = maker_of(runner, WAYS[way])
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    check_batches(runner, made, graphs, [inputs_of(lengths, seed) for seed, lengths in enumerate(LENGTHS)])


MODES = ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_in_a_graph(bert: Runner, include_prompt: bool, in_parts: bool, way: str) -> None:
    pooling = Pooling(modes=tuple(MODES), include_prompt=include_prompt)  # type: ignore[arg-type]
    readout = Embedding(pooling, torch.nn.Sequential(), in_parts=in_parts)
    width = HIDDEN * len(MODES)
    old = bert.pipeline
    pipeline = Pipeline(old.transform, readout, Sizes(width, HIDDEN, HIDDEN), old.activation, old.device)
    runner = Runner(pipeline, bert.lane, bert.facts, bert.limits, bert._grouping)
    made = maker_of(runner, WAYS[way])
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    check_batches(runner, made, graphs, [inputs_of(lengths, seed) for seed, lengths in enumerate(LENGTHS)])


def test_padding_ids_within_inputs_keep_their_positions(tmp_path: Path) -> None:
    """The RoBERTa family counts positions but for padding ids; those of the batch before, or of none."""
    runner = runner_of(build_x(tmp_path / "x"))
    made = maker_of(runner)
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    with_pads = [Input(np.array([0, 10, 1, 1, 12, 2], dtype=np.int32)), Input(np.array([1, 1, 5], dtype=np.int32))]
    check_batches(runner, made, graphs, [with_pads, inputs_of((6, 3), 1, 4), with_pads[:1], with_pads, [with_pads[1]] * 4])


def test_token_types_reach_the_graph_and_do_not_stay(bert: Runner) -> None:
    made = maker_of(bert)
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    plain = inputs_of((6, 5, 4))
    typed = [Input(each.ids, extras={"token_type_ids": Extra.of_tokens(torch.ones(len(each)).long())}) for each in plain]
    assert not torch.allclose(bert.pipeline.forward(plain), bert.pipeline.forward(typed), atol=1e-2)
    check_batches(bert, made, graphs, [typed, plain, typed[:1], plain[:2]])
    lane = QueuedLane(bert.pipeline, made.queues, graphs)
    for batch in (typed, plain, typed[:1], plain[:2]):
        check_lane(lane, bert.pipeline, batch)


class Adding(torch.nn.Module):
    """A transformer that adds what it is given to its hidden states: a bias for each token, one for each input, and of both
    kinds some whose symbolic dimension is the last."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.inner = transformer
        self.config = transformer.config

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        by_token: torch.Tensor,
        by_input: torch.Tensor,
        token_last: torch.Tensor,
        input_last: torch.Tensor,
    ) -> Any:
        output = self.inner(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
        hidden = output.last_hidden_state + by_token + token_last.sum(0)[None, :, None]
        return (hidden + (by_input.sum() + (input_last * torch.arange(1, input_last.shape[1] + 1)).sum()),)


SPECS = [
    EncodeExtraInputSpec(name="by_token", shape=("num_tokens", HIDDEN), dtype="float32"),
    EncodeExtraInputSpec(name="by_input", shape=("batch_size", 2), dtype="float32"),
    EncodeExtraInputSpec(name="token_last", shape=(3, "num_tokens"), dtype="int64"),
    EncodeExtraInputSpec(name="input_last", shape=(2, "batch_size"), dtype="float32"),
]


def test_declared_tensors_of_tokens_and_of_inputs_on_any_axis(bert: Runner) -> None:
    """Zeros for dummies and filler; nothing of a larger batch before."""
    forward = bert.pipeline.transform
    assert isinstance(forward, PackedForward)
    transformer: Any = Adding(forward._transformer)
    pipeline = bert.pipeline.with_forward(PackedForward(transformer, forward.way))
    runner = Runner(pipeline, bert.lane, bert.facts, bert.limits, bert._grouping)
    made = maker_of(runner, specs=SPECS)
    graphs = made.maker.make(Buckets.of(CONFIG, 8, 64, 20))
    random = np.random.default_rng(7)

    def drawn(spec: EncodeExtraInputSpec, tokens: int) -> Extra:
        values = torch.from_numpy(random.normal(size=spec.sizes(tokens, 1)) * 3).to(getattr(torch, spec.dtype))
        return Extra(values, spec.axis, spec.per)

    batches = [
        [Input(each.ids, extras={spec.name: drawn(spec, len(each)) for spec in SPECS}) for each in inputs_of(lengths, seed)]
        for seed, lengths in enumerate(LENGTHS)
    ]
    check_batches(runner, made, graphs, batches)
    some = [Input(each.ids, extras={"by_token": each.extras["by_token"]}) for each in batches[0]]
    assert graphs.find(layout_of([5]), frozenset(some[0].extras)) is None, "not the tensors that it was recorded with"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["bert", "qwen3", "gemma3", "modernbert", "roberta-classifier", "bert-token-reward"])
def test_no_tensor_of_the_host_is_read_on_the_device(
    tmp_path: Path, model: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors that have a device of their own and no values: a copy, or a value that is asked for, raises."""
    monkeypatch.setattr(load, "prepack_linears", lambda *_: 0)
    runner = runner_of((build_head if model in HEADS else build_family)(tmp_path / "m", model))
    forward = runner.pipeline.transform
    assert isinstance(forward, PackedForward)
    shape = Shape(32, 4, 12)
    pipeline = runner.pipeline.with_forward(forward.attending(WAYS[way]))
    arrays = pipeline.arrays(inputs_of((9, 7, 11, 2)), layout_of([9, 7, 11, 2]), shape)
    for module in modules_of(pipeline):
        module.to("meta")
    tensors = {name: torch.from_numpy(array).to("meta") for name, array in arrays.items()}
    with Watch() as watch:
        outputs = pipeline.compute(tensors, None, shape, {})
    assert outputs.device.type == "meta"
    assert outputs.dtype == torch.float32
    assert outputs.shape == (32 if pipeline.is_per_token else 4, pipeline.width(per_token=False))
    assert len(watch.steps) > 20


def modules_of(pipeline: Pipeline) -> list[torch.nn.Module]:
    """All that a pipeline computes with."""
    forward: Any = pipeline.transform
    readout: Any = pipeline._readout
    head = readout._parts if isinstance(readout, Embedding) else readout._head._model
    return [forward._transformer, head]
