"""A model as one function: inputs in, outputs out. One forward of its transformer, then what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import Forward
from packhorse_worker.engine.heads import Readout
from packhorse_worker.engine.packing import layout_of


class Pipeline:
    """A transformer and what is read off its hidden states, on one device."""

    def __init__(self, forward: Forward, readout: Readout, dimension: int, activation: nn.Module, device: torch.device) -> None:
        self._forward = forward
        self._readout = readout
        self.dimension = dimension
        """Size of an input's output; of a token-level model's, of a token's."""
        self.activation = activation
        """Logits to scores; ``Identity`` where the model's files name none."""
        self.device = device

    @property
    def is_packed(self) -> bool:
        """Whether inputs of any lengths run without padding."""
        return self._forward.is_packed

    @property
    def is_per_token(self) -> bool:
        """Whether the model gives a row of logits for each token."""
        return self._readout.is_per_token

    @property
    def token_types(self) -> int:
        """Rows of the table of token types that the transformer's forward reads; 0 where it reads none, or has no table."""
        return self._forward.token_types

    def takes(self, name: str) -> bool:
        """Whether the transformer's forward names this argument."""
        return self._forward.takes(name)

    @torch.inference_mode()
    def forward(
        self, inputs: Sequence[Input], *, per_token: bool = False, constants: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Outputs in float32 on the device, not looked at for NaN.

        ``inputs``: at least one, none empty, all with the same extras. Shape (inputs, dimension); of a token-level model
        (tokens, dimension), the inputs one behind the other; and with ``per_token`` (tokens, hidden size) of any other one.
        ``constants`` are handed to the transformer as they are.
        """
        layout = layout_of([len(each) for each in inputs])
        hidden = self._forward(inputs, layout, constants or {})
        if per_token and not self.is_per_token:
            return hidden[: layout.tokens].float()
        return self._readout(hidden, inputs, layout)
