"""Keyword arguments of ``Encoder.encode`` that go to the model: tensors with parts for each of its inputs, and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.extra_inputs import EMBEDDINGS, RESERVED_INPUTS, TYPE_IDS, EncodeExtraInputSpec
from packhorse_shared.values import kind
from packhorse_worker.engine.api.inputs import Tokens
from packhorse_worker.engine.batch import Extra, Input
from packhorse_worker.engine.declared import Declared, dtype_name

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
    embedding_width: int
    """Values in a row of the table of token embeddings."""
    declared: Declared | None = None
    """The tensors that a ``cuda_graph_config`` declares; None without one: any tensor with a row for each token."""


@dataclass(frozen=True)
class _Given:
    """A tensor of a call, and the dimension along which inputs have their parts of it."""

    tensor: torch.Tensor
    spec: EncodeExtraInputSpec | None
    """What was declared; None: a row for each token."""

    def split(self, lengths: Sequence[int]) -> list[Extra]:
        """The part of each input."""
        if self.spec is None:
            return [Extra.of_tokens(rows) for rows in torch.split(self.tensor, list(lengths))]
        axis, per = self.spec.axis, self.spec.per
        sizes = list(lengths) if per == "num_tokens" else [1] * len(lengths)
        return [Extra(rows, axis, per) for rows in torch.split(self.tensor, sizes, axis)]


def ready_inputs(tokens: Sequence[Tokens], model_kwargs: Mapping[str, Any], takes: Takes) -> tuple[list[Input], dict[str, Any]]:
    """The inputs with their parts of every tensor, and the constants: with any, the call runs without a CUDA graph.

    Raises ValueError naming an argument that the model does not take, a tensor that has not one row for each token, or one that
    is not as it was declared.
    """
    arrays = [np.array(each.ids, dtype=np.int32) for each in tokens]
    lengths = [len(each.ids) for each in tokens]
    tensors, constants = _read(model_kwargs, lengths, takes)
    if any(each.type_ids is not None for each in tokens) and model_kwargs.get(TYPE_IDS) is None:
        types = [types for each in tokens for types in each.type_ids or [0] * len(each.ids)]
        tensors[TYPE_IDS] = _handed(TYPE_IDS, torch.tensor(types), None, takes)
    if takes.declared is not None:
        takes.declared.check_all_given(tensors)
    parts = {name: given.split(lengths) for name, given in tensors.items()}
    inputs = [
        Input(ids, each.prompt_tokens, {name: own[index] for name, own in parts.items()})
        for index, (ids, each) in enumerate(zip(arrays, tokens, strict=True))
    ]
    return inputs, constants


def _read(given: Mapping[str, Any], lengths: Sequence[int], takes: Takes) -> tuple[dict[str, _Given], dict[str, Any]]:
    """Tensors (torch or numpy) and constants, told apart."""
    tensors: dict[str, _Given] = {}
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if name in RESERVED_INPUTS:
            raise ValueError(f"{name} is set by the engine, so encode does not take it")
        if not takes.names(name):
            raise ValueError(f"{name} is not an argument of encode, nor of this model's forward")
        if value is None:
            continue
        if isinstance(value, torch.Tensor | np.ndarray):
            tensors[name] = _tensor(name, value, lengths, takes)
            continue
        if name in (TYPE_IDS, EMBEDDINGS):
            raise ValueError(f"{name} is {kind(value)}; give a torch tensor or a numpy array with a row for each token")
        if takes.declared is not None:
            takes.declared.check_constant(name, value)
        constants[name] = value
    return tensors, constants


def _tensor(name: str, value: torch.Tensor | NDArray[Any], lengths: Sequence[int], takes: Takes) -> _Given:
    """A tensor of a call, checked, on the device where it is needed."""
    declared = takes.declared
    # Token types may be given whether they are declared or not: the engine makes them itself where they are not.
    spec = None if declared is None else declared.find(name, None if name == TYPE_IDS else value)
    if spec is not None:
        Declared.check(spec, value, num_tokens=sum(lengths), batch_size=len(lengths))
    tensor = _plain(name, value)
    if spec is None:
        _check_rows(name, tensor, sum(lengths))
    if name == TYPE_IDS:
        _check_types(tensor, takes.types)
    if name == EMBEDDINGS:
        _check_embeddings(tensor, (sum(lengths), takes.embedding_width))
    return _handed(name, tensor, spec, takes)


def _handed(name: str, tensor: torch.Tensor, spec: EncodeExtraInputSpec | None, takes: Takes) -> _Given:
    """In the number format and on the device in which the forward takes it."""
    if spec is not None:
        dtype: torch.dtype = getattr(torch, spec.handed_dtype(dtype_name(takes.dtype)))
    else:  # torch computes little with the rarer kinds
        dtype = takes.dtype if tensor.is_floating_point() else torch.int64
    # Token types of a known table go into a batch's arrays, which are made on the host.
    device = torch.device("cpu") if name == TYPE_IDS and takes.types else takes.device
    return _Given(tensor.to(device, dtype), spec)


def _plain(name: str, value: torch.Tensor | NDArray[Any]) -> torch.Tensor:
    """A tensor of numbers. Arrays are copied, since torch warns of those that may not be changed and refuses those that run
    backwards."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > _LARGEST_NUMBER_BYTES:
            raise ValueError(f"{name} holds {value.dtype}, which no model takes")
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    if value.layout is not torch.strided:
        raise ValueError(f"{name} is a {dtype_name(value.layout)} tensor; give a plain one, as to_dense() makes it")
    if value.device.type == "meta":
        raise ValueError(f"{name} is on the device meta, which holds no values")
    if value.is_complex() or value.is_quantized:
        raise ValueError(f"{name} holds {dtype_name(value.dtype)}, which no model takes")
    return value.detach()


def _check_types(types: torch.Tensor, rows: int | None) -> None:
    """Raise ValueError for what is no type, or outside the table: on a GPU it would end this process's use of the device."""
    if types.is_floating_point():
        raise ValueError(f"{TYPE_IDS} holds {dtype_name(types.dtype)}; types are integers")
    if types.ndim > 1:
        raise ValueError(f"{TYPE_IDS} has the shape {tuple(types.shape)}; give one type for each token")
    if rows is None:
        return
    types = types.long()
    for value in (int(types.min()), int(types.max())) if types.numel() else ():
        if not 0 <= value < rows:
            raise ValueError(f"{TYPE_IDS} has the type {value}; this model's types are 0 to {rows - 1}")


def _check_embeddings(tensor: torch.Tensor, right: tuple[int, int]) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{EMBEDDINGS} holds {dtype_name(tensor.dtype)}; embeddings are floats")
    if tuple(tensor.shape) != right:
        raise ValueError(
            f"{EMBEDDINGS} has the shape {tuple(tensor.shape)}; give (tokens, width of the embedding table), here {right}"
        )


def _check_rows(name: str, tensor: torch.Tensor, tokens: int) -> None:
    if tensor.ndim == 0 or len(tensor) != tokens:
        found = f"has {len(tensor)} rows" if tensor.ndim else "is a single number"
        raise ValueError(
            f"{name} {found}, but the inputs have {tokens} tokens in all; give one row for each token, input by input"
        )
