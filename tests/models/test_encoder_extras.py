"""Keyword arguments of ``Encoder.encode`` that reach the model: packed tensors and constants, against transformers itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import EncodeError, Encoder
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


def test_what_the_model_raises_is_told(encoder: Encoder) -> None:
    with pytest.raises(
        EncodeError, match=r"4 of 4 inputs failed; inputs\[0\]: the model raised RuntimeError on this input: .*size"
    ):
        encoder.encode(INPUTS, inputs_embeds=torch.zeros(TOKENS, HIDDEN + 1))


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
