"""One forward pass of a transformer over a few inputs: packed, or padded where a model cannot be packed.

Both give the same thing: the last hidden state of every token, the inputs one behind the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from packhorse_worker.engine.attention import attend_within
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.packing import Layout, rows_for
from packhorse_worker.engine.transformer import first_position

_PAD_STEP = 8


class Forward(Protocol):
    """Runs the transformer."""

    is_packed: bool

    token_types: int
    """Rows of the table of token types that the transformer's forward reads; 0 where it reads none, or has no table."""

    def takes(self, name: str) -> bool:
        """Whether the transformer's forward names this argument."""

    def __call__(self, inputs: Sequence[Input], layout: Layout, constants: Mapping[str, Any]) -> torch.Tensor:
        """Last hidden state in the transformer's dtype, shape (rows, hidden size): the tokens of all inputs, and perhaps filler
        behind them that is not to be read.

        ``layout`` is that of ``inputs``. ``constants`` are handed to the transformer as they are.
        """


class Arguments:
    """What a transformer's forward takes, and its values that are always the same."""

    def __init__(self, transformer: Any) -> None:
        parameters = inspect.signature(transformer.forward).parameters
        self._names = frozenset(parameters)
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        declared = getattr(transformer.config, "type_vocab_size", 0)
        reads = "token_type_ids" in self._names and isinstance(declared, int)
        self.token_types: int = max(declared, 0) if reads else 0
        """Rows of the table of token types that the forward reads; 0 where it reads none, or has no table."""
        self.fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in self._names else {}

    def takes(self, name: str) -> bool:
        """Whether the forward names this argument."""
        return name in self._names

    def may_take(self, name: str) -> bool:
        """Whether the forward names it, or takes what it does not name."""
        return self._takes_any or name in self._names


class PackedForward:
    """All tokens concatenated in one row; see ``attention.py``. The model's attention must have been replaced.

    Behind them there may be filler (see ``rows_for``): tokens that belong to no input and whose rows nobody reads.
    """

    is_packed = True

    def __init__(self, transformer: nn.Module, device: torch.device) -> None:
        self._transformer = transformer
        self._device = device
        self._arguments = Arguments(transformer)
        self._first_position = first_position(transformer)
        self.takes = self._arguments.takes
        self.token_types = self._arguments.token_types
        self.windows: set[int] = set()
        """The sliding windows that the layers asked for in the latest forward."""

    def __call__(self, inputs: Sequence[Input], layout: Layout, constants: Mapping[str, Any]) -> torch.Tensor:
        """See ``Forward``."""
        rows = rows_for(layout.tokens)
        extras = {
            name: _filled([each.extras[name] for each in inputs], rows)[None].to(self._device) for name in inputs[0].extras
        }
        arguments: dict[str, Any] = {**self._arguments.fixed, **constants, **extras}
        if "inputs_embeds" not in extras:
            ids = np.zeros((1, rows), dtype=np.int64)
            np.concatenate([each.ids for each in inputs], out=ids[0, : layout.tokens], casting="safe")
            arguments["input_ids"] = torch.from_numpy(ids).to(self._device)
        if self._arguments.may_take("position_ids"):
            arguments["position_ids"] = self._positions(layout, rows, None if "inputs_embeds" in extras else ids[0])
        if self._arguments.token_types and "token_type_ids" not in extras:
            arguments["token_type_ids"] = torch.zeros((1, rows), dtype=torch.int64, device=self._device)
        with attend_within(layout) as self.windows:
            return _hidden(self._transformer(**arguments))[0]

    def _positions(self, layout: Layout, rows: int, ids: NDArray[np.int64] | None) -> torch.Tensor:
        """Positions that begin anew with every input, shape (1, rows)."""
        first = self._first_position
        position = torch.arange(first, first + layout.longest)
        parts = [position[: run.length].repeat(run.inputs) for run in layout.runs]
        if first and ids is not None and (ids[: layout.tokens] == first - 1).any():
            parts = [_positions_but(first - 1, ids[start : start + length]) for start, length in _places(layout)]
        return _filled(parts, rows, first)[None].to(self._device)


class PaddedForward:
    """Inputs as rows of a rectangle, padded at their end, with a mask."""

    is_packed = False

    def __init__(self, transformer: nn.Module, pad_id: int, device: torch.device, longest: int | None = None) -> None:
        """``longest``: the most tokens that an input may have; with it, rows are padded to a multiple of 8, for the reason that
        ``rows_for`` gives."""
        self._transformer = transformer
        self._pad_id = pad_id
        self._device = device
        self._longest = longest
        self._arguments = Arguments(transformer)
        self.takes = self._arguments.takes
        self.token_types = self._arguments.token_types

    def __call__(self, inputs: Sequence[Input], layout: Layout, constants: Mapping[str, Any]) -> torch.Tensor:
        """See ``Forward``."""
        width = layout.longest
        if self._longest is not None:
            width = max(width, min(-(-width // _PAD_STEP) * _PAD_STEP, self._longest))
        mask = torch.arange(width) < torch.tensor(layout.lengths)[:, None]
        extras = {
            name: torch.stack([_filled([each.extras[name]], width) for each in inputs]).to(self._device)
            for name in inputs[0].extras
        }
        arguments: dict[str, Any] = {**self._arguments.fixed, **constants, **extras}
        if "inputs_embeds" not in extras:
            ids = np.full(mask.shape, self._pad_id, dtype=np.int64)
            for row, each in zip(ids, inputs, strict=True):
                row[: len(each)] = each.ids
            arguments["input_ids"] = torch.from_numpy(ids).to(self._device)
        arguments["attention_mask"] = mask.long().to(self._device)
        if self._arguments.token_types and "token_type_ids" not in extras:
            arguments["token_type_ids"] = torch.zeros(mask.shape, dtype=torch.int64, device=self._device)
        return _hidden(self._transformer(**arguments))[mask.to(self._device)]


def _positions_but(pad_id: int, ids: NDArray[np.int64]) -> torch.Tensor:
    """Positions of an input that holds the padding id, as the RoBERTa family counts: it has its own, and moves no other."""
    is_real = ids != pad_id
    return torch.from_numpy(is_real.cumsum() * is_real + pad_id)


def _places(layout: Layout) -> Iterator[tuple[int, int]]:
    return zip(layout.starts(), layout.lengths, strict=True)


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return hidden


def _filled(parts: Sequence[torch.Tensor], rows: int, value: int = 0) -> torch.Tensor:
    """The tensors one behind the other, filled up to so many rows."""
    missing = rows - sum(len(each) for each in parts)
    filler = [parts[0].new_full((missing, *parts[0].shape[1:]), value)] if missing else []
    return torch.cat([*parts, *filler])
