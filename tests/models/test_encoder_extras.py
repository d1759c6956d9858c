"""Keyword arguments of ``Encoder.encode`` that reach the model: packed tensors and constants, against transformers itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from packhorse import EncodeCudaGraphConfig, EncodeError, EncodeExtraInputSpec, Encoder
from packhorse_worker.engine.api.extras import Takes, ready_inputs
from packhorse_worker.engine.api.inputs import Tokens
from packhorse_worker.engine.declared import Declared
from packhorse_worker.engine.packing import Shape
from tiny_families import build_family
from tiny_models import HIDDEN

INPUTS = [[2, 10, 11, 12, 13, 3], "t14", [2, 15, 16, 3], "t17 t18 t19"]
LENGTHS = [6, 3, 4, 5]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def encoder(t_model: Path) -> Iterator[Encoder]:
    """Two inputs a batch, and sorted by length: so a tensor's rows must follow their inputs."""
    with Encoder(t_model, max_batch_size=2) as found:
        yield found


@pytest.fixture(scope="module")
def model(t_model: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(t_model).eval()


def narrow(folder: Path) -> int:
    """Width of an ALBERT's embedding table, which is not that of its hidden states."""
    config = json.loads((folder / "config.json").read_text())
    assert config["embedding_size"] != config["hidden_size"]
    return int(config["embedding_size"])


def token_vectors(model: Any, **arguments: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(**{name: tensor[None] for name, tensor in arguments.items()}).last_hidden_state[0]
    return found


@pytest.mark.parametrize("kind", ["int64", "int32", "numpy"])
def test_token_types_are_cut_in_the_order_of_the_inputs(encoder: Encoder, model: Any, kind: str) -> None:
    types = torch.arange(TOKENS) % 3 % 2
    given: Any = types.numpy() if kind == "numpy" else types.to(getattr(torch, kind))
    outputs = encoder.encode(INPUTS, batch_indexed_model_output=False, token_type_ids=given)
    for each, own in zip(outputs, types.split(LENGTHS), strict=True):
        expected = token_vectors(model, input_ids=torch.tensor(each.prompt_token_ids), token_type_ids=own)
        torch.testing.assert_close(each.logits, expected, rtol=0, atol=1e-5)
    plain = encoder.encode(INPUTS, batch_indexed_model_output=False)
    assert all(not torch.allclose(each.logits, other.logits, atol=1e-2) for each, other in zip(outputs, plain, strict=True))


def test_embeddings_instead_of_ids(encoder: Encoder, model: Any) -> None:
    ids = torch.cat([torch.tensor(each.prompt_token_ids) for each in encoder.encode(INPUTS)])
    table = model.get_input_embeddings().weight
    outputs = encoder.encode(INPUTS, inputs_embeds=table[ids])  # as it comes: it requires a gradient
    for each, other in zip(outputs, encoder.encode(INPUTS), strict=True):
        torch.testing.assert_close(each.logits, other.logits, rtol=0, atol=1e-5)
        assert each.prompt_token_ids == other.prompt_token_ids
    noisy = table[ids].detach() + torch.linspace(0, 1, TOKENS)[:, None]
    vectors = encoder.encode(INPUTS, batch_indexed_model_output=False, inputs_embeds=noisy)
    for each, own in zip(vectors, noisy.split(LENGTHS), strict=True):
        torch.testing.assert_close(each.logits, token_vectors(model, inputs_embeds=own), rtol=0, atol=1e-5)


def test_floats_get_the_models_dtype(t_model: Path) -> None:
    with Encoder(t_model, dtype="bfloat16") as encoder:
        output = encoder.encode([2, 10, 3], inputs_embeds=np.ones((3, HIDDEN), dtype=np.float64))
        assert output.logits.dtype == torch.float32
        assert bool(torch.isfinite(output.logits).all())


def test_constants_go_to_the_forward_as_they_are(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    runner = encoder._runner
    assert runner is not None
    forward = runner.pipeline.forward

    def spy(inputs: Any, **arguments: Any) -> torch.Tensor:
        seen.append(dict(arguments["constants"]))
        return forward(inputs, per_token=arguments["per_token"])

    monkeypatch.setattr(runner.pipeline, "forward", spy)
    monkeypatch.setattr(runner.pipeline, "takes", lambda name: name == "alpha")
    encoder.encode("t10", alpha=0.5)
    assert seen == [{"alpha": 0.5}]


def test_what_the_model_raises_is_told(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no such size")

    assert encoder._runner is not None
    monkeypatch.setattr(encoder._runner.pipeline, "forward", forward)
    message = r"4 of 4 inputs failed; inputs\[0\]: the model raised RuntimeError on this input: RuntimeError: no such size"
    with pytest.raises(EncodeError, match=message):
        encoder.encode(INPUTS)


@pytest.mark.parametrize("shape", [(TOKENS, HIDDEN - 1), (TOKENS, HIDDEN, 1), (TOKENS,), (TOKENS, 0), (TOKENS, HIDDEN, HIDDEN)])
def test_embeddings_have_the_width_of_the_embedding_table(encoder: Encoder, shape: tuple[int, ...]) -> None:
    message = rf"^inputs_embeds has the shape {re.escape(str(shape))}; give \(tokens, width of the embedding table\), here "
    with pytest.raises(ValueError, match=message + rf"\({TOKENS}, {HIDDEN}\)$"):
        encoder.encode(INPUTS, inputs_embeds=torch.zeros(shape))


def test_the_embedding_table_may_be_narrower_than_the_hidden_states(tmp_path: Path) -> None:
    """As ALBERT's is."""
    folder = build_family(tmp_path, "albert")
    with Encoder(folder) as found:
        width = narrow(folder)
        assert found.encode([2, 10, 3], inputs_embeds=torch.zeros(3, width)).logits.shape == (found.dimension,)
        with pytest.raises(ValueError, match=rf"here \(3, {width}\)$"):
            found.encode([2, 10, 3], inputs_embeds=torch.zeros(3, found.dimension))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"token_type_ids": torch.zeros(TOKENS - 1, dtype=torch.int64)},
            rf"token_type_ids has {TOKENS - 1} rows.* {TOKENS} tokens",
        ),
        ({"inputs_embeds": torch.zeros(1, TOKENS, HIDDEN)}, rf"inputs_embeds has 1 rows.* {TOKENS} tokens"),
        ({"token_type_ids": torch.tensor(0)}, rf"token_type_ids is a single number.* {TOKENS} tokens"),
        ({"token_type_ids": torch.full((TOKENS,), 2)}, "token_type_ids has the type 2; this model's types are 0 to 1"),
        ({"token_type_ids": torch.full((TOKENS,), -1)}, "token_type_ids has the type -1"),
        ({"colour": torch.zeros(TOKENS)}, "colour is not an argument of encode, nor of this model's forward"),
        ({"add_special_token": False}, "add_special_token is not an argument"),
        ({"kwargs": 1}, "kwargs is set by the engine"),
        *(
            ({name: torch.ones(TOKENS)}, f"{name} is set by the engine")
            for name in ("input_ids", "attention_mask", "position_ids", "use_cache", "past_key_values", "output_hidden_states")
        ),
    ],
    ids=str,
)
def test_what_does_not_fit(encoder: Encoder, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder.encode(INPUTS, **arguments)


# ---- with a cuda_graph_config, which declares what a call brings along ----

TYPES = EncodeExtraInputSpec("token_type_ids", ("num_tokens",), "int32")
EMBEDS = EncodeExtraInputSpec("inputs_embeds", ("num_tokens", HIDDEN), "float32")


def declaring(t_model: Path, *specs: EncodeExtraInputSpec) -> Encoder:
    return Encoder(t_model, device="cpu", max_batch_size=2, cuda_graph_config=EncodeCudaGraphConfig(extra_model_inputs=specs))


@pytest.fixture(scope="module")
def with_types(t_model: Path) -> Iterator[Encoder]:
    with declaring(t_model, TYPES) as found:
        yield found


def test_declared_tensors_give_what_undeclared_ones_give(t_model: Path, encoder: Encoder, with_types: Encoder) -> None:
    types = torch.arange(TOKENS) % 3 % 2
    expected = encoder.encode(INPUTS, token_type_ids=types, return_raw_logits=True)
    for given in (
        types.int(),
        types.int().numpy(),
        types.int().numpy().astype(">i4"),
        np.flip(types.int().numpy()[::-1].copy()),
    ):
        found = with_types.encode(INPUTS, token_type_ids=given, return_raw_logits=True)
        assert torch.equal(found, expected)
    embeds = torch.linspace(-1, 1, TOKENS * HIDDEN).reshape(TOKENS, HIDDEN)
    with declaring(t_model, EMBEDS) as embedding:
        found = embedding.encode(INPUTS, inputs_embeds=embeds, return_raw_logits=True)
        assert torch.equal(found, encoder.encode(INPUTS, inputs_embeds=embeds, return_raw_logits=True))
        types_too = embedding.encode(INPUTS, inputs_embeds=embeds, token_type_ids=types, return_raw_logits=True)
        both = encoder.encode(INPUTS, inputs_embeds=embeds, token_type_ids=types, return_raw_logits=True)
        assert torch.equal(types_too, both), "token types need no declaration"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {},
            r"token_type_ids is missing: .*\.extra_model_inputs declares it; give .* shape \(num_tokens,\) of int32",
        ),
        ({"token_type_ids": None}, "token_type_ids is missing"),
        ({"token_type_ids": [0] * TOKENS}, "token_type_ids is a list; give a torch tensor"),
        (
            {"token_type_ids": torch.zeros(TOKENS).long()},
            r"token_type_ids holds int64; .* declares int32, shape \(num_tokens,\)",
        ),
        ({"token_type_ids": np.zeros(TOKENS)}, "token_type_ids holds float64; .* declares int32"),
        ({"token_type_ids": torch.zeros(1, TOKENS).int()}, rf"has 2 dimensions, shape \(1, {TOKENS}\); .* declares 1, shape"),
        (
            {"token_type_ids": torch.zeros(TOKENS + 1).int()},
            rf"shape \({TOKENS + 1},\); dimension 0 is {TOKENS + 1} and must be {TOKENS} \(num_tokens, the tokens",
        ),
        ({"token_type_ids": torch.full((TOKENS,), 2).int()}, "token_type_ids has the type 2; this model's types are 0 to 1"),
        (
            {"token_type_ids": torch.zeros(TOKENS).int(), "inputs_embeds": torch.zeros(TOKENS, HIDDEN)},
            "inputs_embeds is a tensor that .* does not declare; declared are token_type_ids; declare it, .* dtype float32",
        ),
        ({"token_type_ids": torch.zeros(TOKENS).int(), "colour": 1}, "colour is not an argument of encode"),
        (
            {"token_type_ids": torch.zeros(TOKENS).int(), "position_ids": torch.zeros(TOKENS)},
            "position_ids is set by the engine",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_not_as_declared(with_types: Encoder, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_types.encode(INPUTS, **given)


def test_a_configuration_that_declares_nothing_takes_no_tensors_but_types(t_model: Path, encoder: Encoder) -> None:
    types = torch.ones(TOKENS, dtype=torch.int64)
    with declaring(t_model) as plain:
        found = plain.encode(INPUTS, token_type_ids=types, return_raw_logits=True)
        assert torch.equal(found, encoder.encode(INPUTS, token_type_ids=types, return_raw_logits=True))
        with pytest.raises(
            ValueError, match=r"inputs_embeds is a tensor that cuda_graph_config.extra_model_inputs does not declare; dec"
        ):
            plain.encode(INPUTS, inputs_embeds=torch.zeros(TOKENS, HIDDEN))


def test_a_declared_tensor_that_the_model_does_not_take(t_model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^cuda_graph_config.extra_model_inputs: colour is not an argument of this model's fo"
    ):
        declaring(t_model, TYPES, EncodeExtraInputSpec("colour", ("num_tokens",), "int64"))


def test_declared_embeddings_have_the_width_of_the_embedding_table(t_model: Path) -> None:
    message = rf"^cuda_graph_config\.extra_model_inputs: inputs_embeds has 7 numbers for each token.* width {HIDDEN}"
    with pytest.raises(ValueError, match=message):
        declaring(t_model, TYPES, EncodeExtraInputSpec("inputs_embeds", ("num_tokens", 7), "float32"))


SPECS = (
    EncodeExtraInputSpec("rows", ("num_tokens",), "int8"),
    EncodeExtraInputSpec("columns", (2, "num_tokens"), "float16"),
    EncodeExtraInputSpec("middle", (2, "num_tokens", 3), "bool"),
    EncodeExtraInputSpec("ages", ("batch_size",), "int32"),
    EncodeExtraInputSpec("pairs", (3, "batch_size"), "float64"),
)


def takes_all(*specs: EncodeExtraInputSpec, types: int | None = None) -> Takes:
    return Takes(lambda _: True, types, torch.device("cpu"), torch.bfloat16, HIDDEN, Declared(specs))


def tensors_for(specs: tuple[EncodeExtraInputSpec, ...], lengths: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {spec.name: spec.sizes(sum(lengths), len(lengths)) for spec in specs}
    return {
        spec.name: torch.randint(0, 100, sizes[spec.name], generator=generator).to(getattr(torch, spec.dtype)) for spec in specs
    }


def test_declared_tensors_are_split_along_their_axis_and_joined_again(encoder: Encoder) -> None:
    """In the declared number format, whichever the axis."""
    lengths = [3, 1, 4]
    given = tensors_for(SPECS, lengths)
    inputs, constants = ready_inputs([Tokens([5] * length) for length in lengths], {**given, "alpha": 0.5}, takes_all(*SPECS))
    assert constants == {"alpha": 0.5}
    for each, length in zip(inputs, lengths, strict=True):
        shapes = {name: (tuple(extra.rows.shape), extra.axis, extra.per) for name, extra in each.extras.items()}
        assert shapes == {
            "rows": ((length,), 0, "num_tokens"),
            "columns": ((2, length), 1, "num_tokens"),
            "middle": ((2, length, 3), 1, "num_tokens"),
            "ages": ((1,), 0, "batch_size"),
            "pairs": ((3, 1), 1, "batch_size"),
        }
    assert encoder._runner is not None
    joined = encoder._runner.pipeline.transform.extras(inputs, Shape(sum(lengths), len(lengths), max(lengths)))
    for name, tensor in given.items():
        assert joined[name].dtype == tensor.dtype
        assert torch.equal(joined[name].reshape(tensor.shape), tensor)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_dimension_is_checked(spec: EncodeExtraInputSpec) -> None:
    tokens = [Tokens([5] * length) for length in (3, 1, 4)]
    right = tensors_for((spec,), [3, 1, 4])[spec.name]
    ready_inputs(tokens, {spec.name: right}, takes_all(spec))
    for axis, size in enumerate(right.shape):
        wrong = torch.cat([right, right], axis)
        with pytest.raises(
            ValueError, match=rf"^{spec.name} has the shape .*; dimension {axis} is {2 * size} and must be {size}"
        ):
            ready_inputs(tokens, {spec.name: wrong}, takes_all(spec))
    with pytest.raises(ValueError, match=rf"^{spec.name} has {right.ndim + 1} dimensions"):
        ready_inputs(tokens, {spec.name: right[None]}, takes_all(spec))
    with pytest.raises(ValueError, match=rf"^{spec.name} holds int16; .* declares {spec.dtype}"):
        ready_inputs(tokens, {spec.name: right.short()}, takes_all(spec))
    with pytest.raises(ValueError, match=rf"^{spec.name} is a list; give a torch tensor or a numpy array, shape \("):
        ready_inputs(tokens, {spec.name: right.tolist()}, takes_all(spec))
    with pytest.raises(ValueError, match=rf"^{spec.name} is missing"):
        ready_inputs(tokens, {}, takes_all(spec))


def test_declared_embeddings_get_the_models_number_format() -> None:
    [read], _ = ready_inputs([Tokens([5, 6])], {"inputs_embeds": torch.ones(2, HIDDEN)}, takes_all(EMBEDS))
    assert read.extras["inputs_embeds"].rows.dtype == torch.bfloat16


@pytest.mark.parametrize("specs", [(), (TYPES,)], ids=["undeclared", "declared"])
@pytest.mark.parametrize("given", [{}, {"token_type_ids": None}], ids=["nothing", "none"])
def test_token_types_that_the_engine_makes_count_as_given(
    specs: tuple[EncodeExtraInputSpec, ...], given: dict[str, Any]
) -> None:
    pair, text = Tokens([5, 6, 7], type_ids=[0, 1, 1]), Tokens([5, 6])
    inputs, constants = ready_inputs([pair, text], given, takes_all(*specs, types=2))
    assert [each.extras["token_type_ids"].rows.tolist() for each in inputs] == [[0, 1, 1], [0, 0]]
    assert {each.extras["token_type_ids"].rows.dtype for each in inputs} == {torch.int64}
    assert constants == {}
