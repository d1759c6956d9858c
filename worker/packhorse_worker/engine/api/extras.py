"""Keyword arguments of ``Encoder.encode`` that go to the model's forward: tensors with a row for each token, and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_worker.engine.api.inputs import Tokens
from packhorse_worker.engine.batch import Input

_RESERVED = frozenset(
    {
        "args",
        "attention_mask",
        "attn_metadata",
        "cache_position",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "input_ids",
    }
    | {"kwargs", "labels", "logits_to_keep", "output_attentions", "output_hidden_states", "past_key_values", "position_ids"}
    | {"return_context_logits", "return_dict", "seq_lens", "use_cache"}
)
"""What the engine sets itself, or what would change the shape of what the model gives back."""
_TYPES = "token_type_ids"
_EMBEDDINGS = "inputs_embeds"
_LARGEST_NUMBER_BYTES = 8
"""torch has no larger ones."""


@dataclass(frozen=True)
class Takes:
    """What a model's forward takes."""

    names: Callable[[str], bool]
    """Whether it has an argument of this name."""
    types: int | None
    """Rows of its table of token types; None where that is not known."""
    device: torch.device
    dtype: torch.dtype
    """Of tensors of floats."""


def ready_inputs(tokens: Sequence[Tokens], model_kwargs: Mapping[str, Any], takes: Takes) -> tuple[list[Input], dict[str, Any]]:
    """The inputs with their rows of every tensor, and the constants.

    Raises ValueError naming an argument that the model does not take, or a tensor that has not one row for each token.
    """
    arrays = [np.array(each.ids, dtype=np.int32) for each in tokens]
    if any(each.type_ids is not None for each in tokens) and _TYPES not in model_kwargs:
        types = [types for each in tokens for types in each.type_ids or [0] * len(each.ids)]
        model_kwargs = {**model_kwargs, _TYPES: torch.tensor(types)}
    if not model_kwargs:
        return [Input(ids, each.prompt_tokens) for ids, each in zip(arrays, tokens, strict=True)], {}
    tensors, constants = _read(model_kwargs, takes)
    lengths = [len(each.ids) for each in tokens]
    parts = {name: _split(name, tensor, lengths) for name, tensor in tensors.items()}
    inputs = [
        Input(ids, each.prompt_tokens, {name: rows[index] for name, rows in parts.items()})
        for index, (ids, each) in enumerate(zip(arrays, tokens, strict=True))
    ]
    return inputs, constants


def _read(given: Mapping[str, Any], takes: Takes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors (torch or numpy) and constants, told apart."""
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if name in _RESERVED:
            raise ValueError(f"{name} is set by the engine, so encode does not take it")
        if not takes.names(name):
            raise ValueError(f"{name} is not an argument of encode, nor of this model's forward")
        if value is None:
            continue
        if not isinstance(value, torch.Tensor | np.ndarray):
            if name in (_TYPES, _EMBEDDINGS):
                raise ValueError(
                    f"{name} is a {type(value).__name__}; give a torch tensor or a numpy array with a row for each token"
                )
            constants[name] = value
            continue
        tensor = _tensor(name, value)
        if name == _TYPES:
            _check_types(tensor, takes.types)
        if name == _EMBEDDINGS and not tensor.is_floating_point():
            raise ValueError(f"{_EMBEDDINGS} holds integers; embeddings are floats")
        tensors[name] = tensor.to(takes.device, takes.dtype if tensor.is_floating_point() else torch.int64)
    return tensors, constants


def _tensor(name: str, value: torch.Tensor | NDArray[Any]) -> torch.Tensor:
    """A plain tensor of floats, or of integers as int64: torch computes little with the rarer kinds. Arrays are copied, since
    torch warns of those that may not be changed and refuses those that run backwards."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > _LARGEST_NUMBER_BYTES:
            raise ValueError(f"{name} holds {value.dtype}, which no model takes")
        value = torch.from_numpy(value.astype(np.float32 if value.dtype.kind == "f" else np.int64))
    if value.layout is not torch.strided:
        raise ValueError(f"{name} is a {_word(value.layout)} tensor; give a plain one, as to_dense() makes it")
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the device meta, which holds no values")
    if value.is_complex() or value.is_quantized:
        raise ValueError(f"{name} holds {_word(value.dtype)}, which no model takes")
    return value.detach() if value.is_floating_point() else value.detach().long()


def _word(of_torch: object) -> str:
    return str(of_torch).removeprefix("torch.")


def _check_types(types: torch.Tensor, rows: int | None) -> None:
    """Raise ValueError for what is no type, or outside the table: on a GPU it would end this process's use of the device."""
    if types.is_floating_point():
        raise ValueError(f"{_TYPES} holds {_word(types.dtype)}; types are integers")
    if types.ndim > 1:
        raise ValueError(f"{_TYPES} has the shape {tuple(types.shape)}; give one type for each token")
    if rows is None:
        return
    for value in (int(types.min()), int(types.max())) if types.numel() else ():
        if not 0 <= value < rows:
            raise ValueError(f"{_TYPES} has the type {value}; this model's types are 0 to {rows - 1}")


def _split(name: str, tensor: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """The rows of each input."""
    if tensor.ndim == 0 or len(tensor) != sum(lengths):
        found = f"has {len(tensor)} rows" if tensor.ndim else "is a single number"
        raise ValueError(
            f"{name} {found}, but the inputs have {sum(lengths)} tokens in all; give one row for each token, input by input"
        )
    return torch.split(tensor, list(lengths))
