"""One forward pass of a transformer over a few inputs: packed, or padded where a model cannot be packed.

It has two halves. ``arrays`` says on the host what the transformer reads; the call computes from the same things as tensors on
the device, and reads no value back: so it can run behind others that are still under way, or be captured as a CUDA graph. Both
kinds give the same thing: the last hidden state of every token, the inputs one behind the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from packhorse_worker.engine.attention.packed import attend_within
from packhorse_worker.engine.attention.way import Way
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.packing import Layout, Shape, rows_for
from packhorse_worker.engine.transformer import first_position

Arrays = dict[str, NDArray[Any]]
"""What a forward or a readout needs on the device, by name. Sizes and number formats follow from the ``Shape`` alone."""
Tensors = Mapping[str, torch.Tensor]
"""The same on the device."""

_PAD_STEP = 8
_TYPES = "token_type_ids"


class Forward(Protocol):
    """Runs the transformer."""

    is_packed: bool

    token_types: int
    """Rows of the table of token types that the transformer's forward reads; 0 where it reads none, or has no table."""

    def takes(self, name: str) -> bool:
        """Whether the transformer's forward names this argument."""

    def makes(self, name: str) -> bool:
        """Whether ``arrays`` has what inputs bring along under this name: token types, where there is a table of them."""

    def shape(self, layout: Layout) -> Shape:
        """The shape of an eager forward over inputs that lie so."""

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape) -> Arrays:
        """What the forward reads. ``layout`` may have dummies behind the ``inputs``, whose tokens are 0."""

    def extras(self, inputs: Sequence[Input], shape: Shape) -> dict[str, torch.Tensor]:
        """The tensors that the inputs bring along, joined, as arguments of the transformer; where they were."""

    def __call__(self, tensors: Tensors, layout: Layout | None, shape: Shape, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Last hidden state in the transformer's dtype, shape (rows, hidden size): the tokens of all inputs, and perhaps filler
        behind them that is not to be read.

        ``tensors``: those of ``arrays``, on the device. ``layout`` None: not known, as while a graph is captured. ``arguments``
        are handed to the transformer as they are: ``extras`` and constants.
        """


class Arguments:
    """What a transformer's forward takes, and its values that are always the same."""

    def __init__(self, transformer: Any) -> None:
        parameters = inspect.signature(transformer.forward).parameters
        self._names = frozenset(parameters)
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        declared = getattr(transformer.config, "type_vocab_size", 0)
        reads = _TYPES in self._names and isinstance(declared, int)
        self.token_types: int = max(declared, 0) if reads else 0
        """Rows of the table of token types that the forward reads; 0 where it reads none, or has no table."""
        self.fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in self._names else {}

    def takes(self, name: str) -> bool:
        """Whether the forward names this argument."""
        return name in self._names

    def may_take(self, name: str) -> bool:
        """Whether the forward names it, or takes what it does not name."""
        return self._takes_any or name in self._names

    def makes(self, name: str) -> bool:
        """Whether a forward here makes an array of this extra: token types, where it has a table of them."""
        return name == _TYPES and self.token_types > 0


class PackedForward:
    """All tokens concatenated in one row; see ``attention/``. The model's attention must have been replaced.

    Behind them there may be filler (see ``rows_for``): tokens that belong to no input and whose rows nobody reads.
    """

    is_packed = True

    def __init__(self, transformer: nn.Module, way: Way) -> None:
        self._transformer = transformer
        self.way = way
        self._arguments = Arguments(transformer)
        self._first_position = first_position(transformer)
        self._takes_positions = self._arguments.may_take("position_ids")
        self.takes = self._arguments.takes
        self.makes = self._arguments.makes
        self.token_types = self._arguments.token_types
        self.windows: set[int] = set()
        """The sliding windows that the layers asked for in the latest forward."""

    def attending(self, way: Way) -> Self:
        """The same with another way of attention."""
        return type(self)(self._transformer, way)

    def shape(self, layout: Layout) -> Shape:
        """See ``Forward``."""
        return Shape(rows_for(layout.tokens), len(layout.lengths), layout.longest)

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape) -> Arrays:
        """See ``Forward``."""
        arrays: Arrays = {}
        ids = np.zeros((1, shape.num_tokens), dtype=np.int64)
        real = int(layout.offsets[len(inputs)])
        np.concatenate([each.ids for each in inputs], out=ids[0, :real], casting="safe")
        has_ids = "inputs_embeds" not in inputs[0].extras
        if has_ids:
            arrays["input_ids"] = ids
        if self._takes_positions:
            arrays["position_ids"] = self._positions(layout, ids if has_ids else None, shape.num_tokens)
        if self._arguments.token_types:
            arrays[_TYPES] = types = np.zeros((1, shape.num_tokens), dtype=np.int64)
            if _TYPES in inputs[0].extras:
                np.copyto(types[0, :real], _types_of(inputs), casting="same_kind")
        return arrays | self.way.arrays(layout, shape)

    def extras(self, inputs: Sequence[Input], shape: Shape) -> dict[str, torch.Tensor]:
        """See ``Forward``."""
        joined = {}
        for name, first in inputs[0].extras.items():
            if self.makes(name):
                continue
            size = shape.num_tokens if first.per == "num_tokens" else shape.batch_size
            tensor = _filled([each.extras[name].rows for each in inputs], size, first.axis)
            joined[name] = tensor[None] if first.is_of_tokens else tensor
        return joined

    def __call__(self, tensors: Tensors, layout: Layout | None, shape: Shape, arguments: Mapping[str, Any]) -> torch.Tensor:
        """See ``Forward``."""
        given = {name: tensors[name] for name in ("input_ids", "position_ids", _TYPES) if name in tensors}
        with attend_within(self.way, layout, shape, tensors) as self.windows:
            return _hidden(self._transformer(**self._arguments.fixed, **given, **arguments))[0]

    def _positions(self, layout: Layout, ids: NDArray[np.int64] | None, rows: int) -> NDArray[np.int64]:
        """Positions that begin anew with every input, shape (1, rows)."""
        first = self._first_position
        positions = np.full((1, rows), first, dtype=np.int64) if first else np.zeros((1, rows), dtype=np.int64)
        if first and ids is not None and (ids[0, : layout.tokens] == first - 1).any():
            for start, length in zip(layout.starts.tolist(), layout.lengths, strict=True):
                positions[0, start : start + length] = _positions_but(first - 1, ids[0, start : start + length])
        else:
            positions[0, : layout.tokens] += layout.within
        return positions


class PaddedForward:
    """Inputs as rows of a rectangle, padded at their end, with a mask."""

    is_packed = False

    def __init__(self, transformer: nn.Module, pad_id: int, longest: int | None = None) -> None:
        """``longest``: the most tokens that an input may have; with it, rows are padded to a multiple of 8, for the reason that
        ``rows_for`` gives."""
        self._transformer = transformer
        self._pad_id = pad_id
        self._longest = longest
        self._arguments = Arguments(transformer)
        self.takes = self._arguments.takes
        self.makes = self._arguments.makes
        self.token_types = self._arguments.token_types

    def shape(self, layout: Layout) -> Shape:
        """See ``Forward``."""
        width = layout.longest
        if self._longest is not None:
            width = max(width, min(-(-width // _PAD_STEP) * _PAD_STEP, self._longest))
        return Shape(layout.tokens, len(layout.lengths), width)

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape) -> Arrays:
        """See ``Forward``."""
        is_token = np.arange(shape.seq_len) < layout.sizes[:, None]
        arrays: Arrays = {"attention_mask": is_token.astype(np.int64), "cells": np.flatnonzero(is_token)}
        if "inputs_embeds" not in inputs[0].extras:
            arrays["input_ids"] = np.full(is_token.shape, self._pad_id, dtype=np.int64)
            arrays["input_ids"][is_token] = np.concatenate([each.ids for each in inputs])
        if self._arguments.token_types:
            arrays[_TYPES] = np.zeros(is_token.shape, dtype=np.int64)
            if _TYPES in inputs[0].extras:
                arrays[_TYPES][is_token] = _types_of(inputs)
        return arrays

    def extras(self, inputs: Sequence[Input], shape: Shape) -> dict[str, torch.Tensor]:
        """See ``Forward``."""
        joined = {}
        for name, first in inputs[0].extras.items():
            if self.makes(name):
                continue
            rows = [each.extras[name].rows for each in inputs]
            if first.per == "num_tokens":
                joined[name] = torch.stack([_filled([each], shape.seq_len, first.axis) for each in rows])
            else:
                joined[name] = torch.cat(rows, first.axis)
        return joined

    def __call__(self, tensors: Tensors, layout: Layout | None, shape: Shape, arguments: Mapping[str, Any]) -> torch.Tensor:
        """See ``Forward``."""
        given = {name: tensors[name] for name in ("input_ids", "attention_mask", _TYPES) if name in tensors}
        hidden = _hidden(self._transformer(**self._arguments.fixed, **given, **arguments))
        return hidden.flatten(0, 1)[tensors["cells"]]


def _types_of(inputs: Sequence[Input]) -> NDArray[Any]:
    """The token types of all inputs, joined."""
    types: NDArray[Any] = torch.cat([each.extras[_TYPES].rows for each in inputs]).cpu().numpy()
    return types


def _positions_but(pad_id: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of an input that holds the padding id, as the RoBERTa family counts: it has its own, and moves no other."""
    is_real = ids != pad_id
    positions: NDArray[np.int64] = is_real.cumsum() * is_real + pad_id
    return positions


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden


def _filled(parts: Sequence[torch.Tensor], size: int, axis: int) -> torch.Tensor:
    """The tensors one behind the other along an axis, filled up to a size with zeros."""
    missing = size - sum(each.shape[axis] for each in parts)
    if missing:
        shape = [missing if place == axis else length for place, length in enumerate(parts[0].shape)]
        parts = [*parts, parts[0].new_zeros(shape)]
    return torch.cat(list(parts), axis)
