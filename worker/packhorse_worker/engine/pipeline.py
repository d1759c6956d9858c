"""A model as one function: inputs in, outputs out. One forward of its transformer, then what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import Arrays, Forward, Tensors
from packhorse_worker.engine.heads import Readout
from packhorse_worker.engine.packing import Layout, Shape, layout_of


@dataclass(frozen=True)
class Sizes:
    """Values in a row of what a model gives."""

    dimension: int
    """Of an input's output; of a token-level model's, of a token's."""
    hidden: int
    """Of a token's hidden state."""
    embedding: int
    """Of a token's embedding: the width of the table, which may be another one."""


class Pipeline:
    """A transformer and what is read off its hidden states, on one device."""

    def __init__(self, forward: Forward, readout: Readout, sizes: Sizes, activation: nn.Module, device: torch.device) -> None:
        self.transform = forward
        self._readout = readout
        self._sizes = sizes
        self.activation = activation
        """Logits to scores; ``Identity`` where the model's files name none."""
        self.device = device

    def with_forward(self, forward: Forward) -> Pipeline:
        """The same with another forward of its transformer."""
        return Pipeline(forward, self._readout, self._sizes, self.activation, self.device)

    @property
    def is_packed(self) -> bool:
        """Whether inputs of any lengths run without padding."""
        return self.transform.is_packed

    @property
    def is_per_token(self) -> bool:
        """Whether the model gives a row of logits for each token."""
        return self._readout.is_per_token

    @property
    def token_types(self) -> int:
        """Rows of the table of token types that the transformer's forward reads; 0 where it reads none, or has no table."""
        return self.transform.token_types

    @property
    def embedding_width(self) -> int:
        """Values in a row of the transformer's table of token embeddings."""
        return self._sizes.embedding

    def takes(self, name: str) -> bool:
        """Whether the transformer's forward names this argument."""
        return self.transform.takes(name)

    def gives_tokens(self, *, per_token: bool) -> bool:
        """Whether outputs have a row for each token instead of each input."""
        return per_token or self.is_per_token

    def width(self, *, per_token: bool) -> int:
        """Values in a row of the outputs."""
        return self._sizes.hidden if per_token and not self.is_per_token else self._sizes.dimension

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape) -> Arrays:
        """What ``compute`` reads on the device. ``layout`` may have dummies behind the ``inputs``, and ``shape`` filler behind
        those."""
        return self.transform.arrays(inputs, layout, shape) | self._readout.arrays(inputs, layout, shape)

    @torch.inference_mode()
    def compute(
        self, tensors: Tensors, layout: Layout | None, shape: Shape, arguments: Mapping[str, Any], *, per_token: bool = False
    ) -> torch.Tensor:
        """Outputs in float32 on the device, not looked at for NaN: a row for each input of the shape or each of its rows.

        Reads no value back. ``layout`` None: any of this shape. ``arguments`` are handed to the transformer as they are.
        """
        return self._compute(tensors, layout, shape, arguments, per_token=per_token)

    def _compute(
        self, tensors: Tensors, layout: Layout | None, shape: Shape, arguments: Mapping[str, Any], *, per_token: bool
    ) -> torch.Tensor:
        hidden = self.transform(tensors, layout, shape, arguments)
        if per_token and not self.is_per_token:
            return hidden.float()
        return self._readout(hidden, tensors)

    @torch.inference_mode()
    def forward(
        self, inputs: Sequence[Input], *, per_token: bool = False, constants: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Outputs in float32 on the device, not looked at for NaN.

        ``inputs``: at least one, none empty, all with the same extras. Shape (inputs, dimension); of a token-level model
        (tokens, dimension), the inputs one behind the other; and with ``per_token`` (tokens, hidden size) of any other one.
        ``constants`` are handed to the transformer as they are.
        """
        layout = layout_of([len(each.ids) for each in inputs])
        shape = self.transform.shape(layout)
        arrays = self.arrays(inputs, layout, shape)
        tensors = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        extras = {name: each.to(self.device) for name, each in self.transform.extras(inputs, shape).items()}
        outputs = self._compute(tensors, layout, shape, {**(constants or {}), **extras}, per_token=per_token)
        return outputs[: layout.tokens] if self.gives_tokens(per_token=per_token) else outputs
