"""What follows the transformer: one output for each input, or one for each of its tokens.

A model's own head (classifier, token classifier, language-model head) is run by the model itself, on chosen tokens only: a copy
of the model has a stand-in for its transformer that gives back the hidden states it was handed. So a head never learns whether
its inputs were packed or padded, and every family's own code decides what the logits are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.modules import Pooling, YesNoHead
from packhorse_worker.engine.packing import Layout, Shape
from packhorse_worker.engine.pooling import bags, pool, pool_arrays, sums_of

_ROWS, _BAGS, _COUNTS = "head_rows", "head_bags", "head_counts"


class Readout(Protocol):
    """Hidden states to outputs. It has two halves as a ``Forward`` has: arrays made on the host, and tensors on the device."""

    is_per_token: bool
    """Whether it gives a row for each token instead of each input."""

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape, /) -> dict[str, NDArray[Any]]:
        """What it reads, by name; sizes follow from the shape. ``layout`` may have dummies behind the ``inputs``."""

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor], /) -> torch.Tensor:
        """Outputs, float32, shape (inputs or rows, width). ``hidden`` is what a ``Forward`` gave: tokens, perhaps filler, which
        has rows here too. Reads no value back."""


class Embedding:
    """Pooling, and the parts behind it, in float32 whatever the transformer's dtype."""

    is_per_token = False

    def __init__(self, pooling: Pooling, parts: nn.Sequential, *, in_parts: bool = False) -> None:
        """For ``in_parts`` see ``pool_arrays``."""
        self._pooling = pooling
        self._parts = parts
        self._in_parts = in_parts

    def arrays(self, inputs: Sequence[Input], layout: Layout, shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Readout``."""
        return pool_arrays(inputs, layout, shape, self._pooling, in_parts=self._in_parts)

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Readout``."""
        vectors: torch.Tensor = self._parts(pool(hidden, tensors, self._pooling))
        return vectors


class TokenLogits:
    """The logits of every token: ``*ForTokenClassification``."""

    is_per_token = True

    def __init__(self, model: nn.Module) -> None:
        self._head = OwnHead(model)

    def arrays(self, _inputs: Sequence[Input], _layout: Layout, _shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Readout``."""
        return {}

    def __call__(self, hidden: torch.Tensor, _tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Readout``."""
        return self._head(hidden[None])[0].float()


class Gather(Protocol):
    """Which row a classifier reads, in the two halves of a ``Readout``."""

    def arrays(self, inputs: Sequence[Input], layout: Layout, /) -> dict[str, NDArray[Any]]:
        """What it reads; sizes follow from the inputs of the layout."""

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(inputs, hidden size) out of hidden states (rows, hidden size)."""


class SequenceLogits:
    """The logits of every input: ``*ForSequenceClassification``. Which row its head reads is found out by ``probe.py``."""

    is_per_token = False

    def __init__(self, model: nn.Module, gather: Gather) -> None:
        self._head = OwnHead(model)
        self._gather = gather

    def arrays(self, inputs: Sequence[Input], layout: Layout, _shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Readout``."""
        return self._gather.arrays(inputs, layout)

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Readout``."""
        return self._head(self._gather(hidden, tensors)[:, None]).float()


class YesNoLogits:
    """How much likelier than "no" the model would go on with "yes": the difference of their logits, or the one logit."""

    is_per_token = False

    def __init__(self, model: nn.Module, head: YesNoHead) -> None:
        self._head = OwnHead(model)
        self._true, self._false = head.true_token_id, head.false_token_id

    def arrays(self, _inputs: Sequence[Input], layout: Layout, _shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Readout``."""
        return {_ROWS: layout.lasts}

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Readout``."""
        logits = self._head(hidden[tensors[_ROWS]][:, None])[:, 0].float()
        score = logits[:, self._true]
        return (score if self._false is None else score - logits[:, self._false])[:, None]


def read_off(readout: Readout, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
    """What a readout makes of the hidden states of inputs that lie so: both halves in one."""
    arrays = readout.arrays(inputs, layout, Shape(len(hidden), len(inputs), layout.longest))
    return readout(hidden, {name: torch.from_numpy(array).to(hidden.device) for name, array in arrays.items()})


class OwnHead:
    """A model's own head, without its transformer."""

    def __init__(self, model: Any) -> None:
        self._stand_in = _StandIn(model.base_model)
        self._model = copy.copy(model)
        # A module's copy shares its dictionary of children; the original must keep its transformer.
        self._model._modules = {**model._modules, model.base_model_prefix: self._stand_in}
        # With a single token per row, a decoder's classifier looks at it whatever the padding id is, but it wants one.
        if getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states of shape (rows, tokens, hidden size): (rows, labels), or (rows, tokens, labels)."""
        self._stand_in.hidden = hidden
        places = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            logits: torch.Tensor = self._model(input_ids=places, attention_mask=torch.ones_like(places)).logits
        finally:
            self._stand_in.hidden = None
        return logits


class _StandIn(nn.Module):
    """Answers for a transformer with hidden states that are known already."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.config = transformer.config
        self.hidden: torch.Tensor | None = None
        self._pooler = getattr(transformer, "pooler", None)
        self._pooler_activation = getattr(transformer, "pooler_activation", None)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        assert self.hidden is not None, "no hidden states"
        pooled = None
        if isinstance(self._pooler, nn.Linear) and self._pooler_activation is not None:  # ALBERT has its pooler in two parts
            pooled = self._pooler_activation(self._pooler(self.hidden[:, 0]))
        elif self._pooler is not None:
            pooled = self._pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden, pooler_output=pooled)


class FirstToken:
    """A ``Gather``: the first token of each input."""

    def arrays(self, _inputs: Sequence[Input], layout: Layout) -> dict[str, NDArray[Any]]:
        """See ``Gather``."""
        return {_ROWS: layout.starts}

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Gather``."""
        return hidden[tensors[_ROWS]]


class LastTokenBut(FirstToken):
    """A ``Gather``: the last token that is not ``pad_id``, else the first, as transformers' decoder classifiers have it."""

    def __init__(self, pad_id: int | None) -> None:
        self._pad_id = pad_id

    def arrays(self, inputs: Sequence[Input], layout: Layout) -> dict[str, NDArray[Any]]:
        """See ``Gather``."""
        rows = layout.lasts
        for place, each in enumerate(inputs if self._pad_id is not None else ()):
            if each.ids.item(-1) == self._pad_id:
                rows[place] = layout.starts[place] + max(np.flatnonzero(each.ids != self._pad_id).tolist(), default=0)
        return {_ROWS: rows}


class MeanOfTokens:
    """A ``Gather``: the mean of each input's tokens, in the dtype of the hidden states."""

    def arrays(self, _inputs: Sequence[Input], layout: Layout) -> dict[str, NDArray[Any]]:
        """See ``Gather``."""
        return {_BAGS: bags(layout), _COUNTS: layout.sizes.astype(np.float32)[:, None]}

    def __call__(self, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``Gather``."""
        return (sums_of(hidden.float(), tensors[_BAGS]) / tensors[_COUNTS]).to(hidden.dtype)
