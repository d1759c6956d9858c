"""Linear layers on oneDNN: the same numbers as before, the activation inside, and what must not be touched left alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertForMaskedLM, DebertaConfig, DebertaModel, Qwen3Config, Qwen3ForCausalLM

from packhorse_worker.engine import linear
from packhorse_worker.engine.joined import JoinedPart
from packhorse_worker.engine.linear import OneDnnLinear
from packhorse_worker.engine.prepack import prepack_linears
from tiny_families import FAMILIES, build_family
from tiny_models import SIZES

_FUSED = {"bert", "roberta", "mpnet", "distilbert", "electra", "albert", "deberta-v2", "jina-v3", "t5", "convbert", "fnet"}
_WITHOUT_LINEARS = {"gpt2"}
_JOINED = set(FAMILIES) - {"deberta-v2", "modernbert", "xlnet", "gpt2", "fnet"}


@pytest.fixture(autouse=True)
def _every_packed_layer_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster says the machine; these tests ask whether it is right."""
    monkeypatch.setattr(linear, "_is_faster", lambda *_: True)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_prepacked_family_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    model = _load(build_family(tmp_path, name), torch.float32)
    inputs = [_ids(1, 7), _ids(3, 12), _ids(1, 1)]
    expected = [_hidden(model, ids) for ids in inputs]

    replaced = prepack_linears(model, torch.float32, 64)

    assert (replaced == 0) == (name in _WITHOUT_LINEARS)
    fused = [module for module in model.modules() if isinstance(module, OneDnnLinear) and module._fusion.attr != "none"]
    assert bool(fused) == (name in _FUSED)
    for ids, before in zip(inputs, expected, strict=True):
        torch.testing.assert_close(_hidden(model, ids), before, atol=1e-5, rtol=0)
    joined = {id(module.joined): module.joined for module in model.modules() if isinstance(module, JoinedPart)}
    assert bool(joined) == (name in _JOINED)
    calls = 3 * (2 if name == "albert" else 1)  # ALBERT runs one layer twice
    assert {each.calls for each in joined.values()} <= {calls}, "once for each input, not once for each projection"


def test_minilm_in_bfloat16_stays_as_near_to_float32_as_it_was(minilm_folder: Path) -> None:
    ids = _ids(4, 42)
    exact = _hidden(_load(minilm_folder, torch.float32), ids)
    model = _load(minilm_folder, torch.bfloat16)
    before = (_hidden(model, ids).float() - exact).norm()

    # 6 layers of 6, and the pooler
    assert prepack_linears(model, torch.bfloat16, 1024) == (37 if _packs_bfloat16() else 0)

    assert (_hidden(model, ids).float() - exact).norm() < 1.1 * before


def _packs_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 on this CPU: AVX2 alone does not."""
    try:
        OneDnnLinear(nn.Linear(64, 64, dtype=torch.bfloat16), 16)(torch.ones(16, 64, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu", "quick_gelu"])
def test_the_fused_activation_is_the_one_that_the_model_has(activation: str) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(BertConfig(hidden_act=activation, max_position_embeddings=64, **SIZES)).eval()
    before = _hidden(model, _ids(2, 9))

    prepack_linears(model, torch.float32, 64)

    expected = {"gelu": "gelu", "gelu_new": "gelu", "relu": "relu", "silu": "swish", "quick_gelu": "none"}[activation]
    assert model.encoder.layer[0].intermediate.dense._fusion.attr == expected
    assert isinstance(model.encoder.layer[0].intermediate.intermediate_act_fn, nn.Identity) == (expected != "none")
    torch.testing.assert_close(_hidden(model, _ids(2, 9)), before, atol=1e-5, rtol=0)


def test_a_module_that_only_looks_like_a_known_pair_keeps_its_activation() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(16, 32)
            self.between = nn.LayerNorm(32)
            self.intermediate_act_fn = nn.GELU()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.intermediate_act_fn(self.between(self.dense(values)))

    model = _frozen(Looks())
    before = model(torch.ones(3, 16))

    assert prepack_linears(model, torch.float32, 64) == 1
    assert isinstance(model.intermediate_act_fn, nn.GELU)
    assert model.dense._fusion.attr == "none"
    torch.testing.assert_close(model(torch.ones(3, 16)), before, atol=1e-5, rtol=0)


def test_shared_weights_shared_modules_hooks_and_other_dtypes_are_left_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied, self.table = nn.Linear(16, 16), nn.Embedding(16, 16)
            self.tied.weight = self.table.weight
            self.twice = nn.ModuleList([nn.Linear(16, 16)] * 2)
            self.first = nn.ModuleList([nn.Linear(16, 16)])
            self.second = nn.ModuleList([self.first[0]])
            self.hooked = nn.Linear(16, 16)
            self.hooked.register_forward_hook(lambda *_: None)
            self.exact = nn.Linear(16, 16).double()
            self.attention = nn.MultiheadAttention(16, 2)
            self.plain = nn.Linear(16, 16)

    model = _frozen(Model())

    assert prepack_linears(model, torch.float32, 64) == 1
    assert isinstance(model.plain, OneDnnLinear)
    assert prepack_linears(model, torch.float32, 64) == 0
    assert prepack_linears(_frozen(Model()), torch.float16, 64) == 0


@pytest.mark.parametrize("tie", [True, False])
def test_the_logits_of_a_language_model_keep_their_weight(tie: bool) -> None:
    decoder = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": tie}
    reranker = Qwen3ForCausalLM(Qwen3Config(**decoder, **SIZES)).eval()
    filler = BertForMaskedLM(BertConfig(tie_word_embeddings=tie, **SIZES)).eval()

    assert prepack_linears(reranker, torch.float32, 64) > 0
    assert prepack_linears(filler, torch.float32, 64) > 0

    assert type(reranker.lm_head) is nn.Linear
    assert type(filler.get_output_embeddings()) is nn.Linear


def test_the_first_deberta_slices_a_weight_and_still_runs() -> None:
    torch.manual_seed(0)
    model = _frozen(DebertaModel(DebertaConfig(relative_attention=True, pos_att_type=["c2p", "p2c"], **SIZES)))
    before = _hidden(model, _ids(2, 9))

    assert prepack_linears(model, torch.float32, 64) > 0

    torch.testing.assert_close(_hidden(model, _ids(2, 9)), before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(16,), (7, 16), (1, 7, 16), (2, 3, 4, 16), (0, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_any_shape_and_stride(shape: tuple[int, ...], bias: bool) -> None:
    plain = _frozen(nn.Linear(16, 24, bias=bias))
    packed = OneDnnLinear(plain, 64)
    wide = torch.randn(*shape[:-1], 2 * shape[-1])

    for values in (wide[..., ::2], wide[..., : shape[-1]]):
        torch.testing.assert_close(packed(values), plain(values), atol=1e-5, rtol=0)
    assert (packed.weight.dtype, packed.weight.shape, packed.weight.device.type) == (torch.float32, (24, 16), "cpu")


@pytest.mark.parametrize("fault", ["missing", "raises", "wrong"])
def test_private_operations_that_changed_leave_the_model_as_it_was(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(values: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("linear_pointwise: unsupported")
        return torch.zeros(*values.shape[:-1], weight.shape[0])

    class Ops:
        @staticmethod
        def _reorder_linear_weight(weight: torch.Tensor, *_: Any) -> torch.Tensor:
            return weight

    operations: Any = Ops()
    if fault != "missing":
        operations._linear_pointwise = broken
    monkeypatch.setattr(torch.ops, "mkldnn", operations)
    torch.manual_seed(0)
    model = _frozen(AutoModel.from_config(BertConfig(**SIZES)))
    before = _hidden(model, _ids(2, 9))

    assert prepack_linears(model, torch.float32, 64) == 0
    assert torch.equal(_hidden(model, _ids(2, 9)), before)


@pytest.mark.parametrize(("packed_s", "is_packed"), [(0.5, True), (1.05, True), (1.2, False)])
def test_a_layer_that_is_clearly_slower_stays(packed_s: float, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(linear, "_faster", {})
    seconds = itertools.cycle([1.0, packed_s])  # plain and packed take turns
    monkeypatch.setattr(linear, "_seconds", lambda _: next(seconds))
    model = _frozen(AutoModel.from_config(BertConfig(**SIZES)))

    assert (prepack_linears(model, torch.float32, 64) > 0) == is_packed


def test_the_random_numbers_of_the_process_are_not_touched() -> None:
    model = _frozen(AutoModel.from_config(BertConfig(**SIZES)))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    prepack_linears(model, torch.float32, 64)

    assert torch.equal(torch.rand(2), expected)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForTextEncoding

    encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForTextEncoding if encoder_decoder else AutoModel
    return _frozen(kind.from_pretrained(folder, dtype=dtype))


def _frozen(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def _ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.arange(rows * tokens).reshape(rows, tokens) % 100 + 10


def _hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
