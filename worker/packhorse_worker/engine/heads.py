"""What follows the transformer: one output for each input, or one for each of its tokens.

A model's own head (classifier, token classifier, language-model head) is run by the model itself, on chosen tokens only: a copy
of the model has a stand-in for its transformer that gives back the hidden states it was handed. So a head never learns whether
its inputs were packed or padded, and every family's own code decides what the logits are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.modules import Pooling, YesNoHead
from packhorse_worker.engine.packing import Layout
from packhorse_worker.engine.pooling import pool


class Readout(Protocol):
    """Hidden states to outputs."""

    is_per_token: bool
    """Whether it gives a row for each token instead of each input."""

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        """Outputs, float32, shape (inputs or tokens, width). ``hidden`` is what a ``Forward`` gave: tokens, perhaps filler."""


class Embedding:
    """Pooling, and the parts behind it, in float32 whatever the transformer's dtype."""

    is_per_token = False

    def __init__(self, pooling: Pooling, parts: nn.Sequential) -> None:
        self._pooling = pooling
        self._parts = parts

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        """See ``Readout``."""
        vectors: torch.Tensor = self._parts(pool(hidden, layout, [each.prompt_tokens for each in inputs], self._pooling))
        return vectors


class TokenLogits:
    """The logits of every token: ``*ForTokenClassification``."""

    is_per_token = True

    def __init__(self, model: nn.Module) -> None:
        self._head = OwnHead(model)

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        """See ``Readout``."""
        return self._head(hidden[None, : layout.tokens])[0].float()


Gather = Callable[[torch.Tensor, Sequence[Input], Layout], torch.Tensor]
"""Which row a classifier reads: (inputs, hidden size) out of hidden states (tokens, hidden size)."""


class SequenceLogits:
    """The logits of every input: ``*ForSequenceClassification``. Which row its head reads is found out by ``probe.py``."""

    is_per_token = False

    def __init__(self, model: nn.Module, gather: Gather) -> None:
        self._head = OwnHead(model)
        self._gather = gather

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        """See ``Readout``."""
        return self._head(self._gather(hidden, inputs, layout)[:, None]).float()


class YesNoLogits:
    """How much likelier than "no" the model would go on with "yes": the difference of their logits, or the one logit."""

    is_per_token = False

    def __init__(self, model: nn.Module, head: YesNoHead) -> None:
        self._head = OwnHead(model)
        self._true, self._false = head.true_token_id, head.false_token_id

    def __call__(self, hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        """See ``Readout``."""
        logits = self._head(_last(hidden, layout)[:, None])[:, 0].float()
        score = logits[:, self._true]
        return (score if self._false is None else score - logits[:, self._false])[:, None]


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


def first_token(hidden: torch.Tensor, _inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
    """A ``Gather``: the first token of each input."""
    return hidden[torch.tensor(layout.starts(), device=hidden.device)]


def last_token_but(pad_id: int | None) -> Gather:
    """A ``Gather``: the last token that is not ``pad_id``, else the first, as transformers' decoder classifiers have it."""

    def last_token(hidden: torch.Tensor, inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
        ends = []
        for start, each in zip(layout.starts(), inputs, strict=True):
            last = len(each) - 1
            if pad_id is not None and each.ids[last] == pad_id:
                last = max(np.flatnonzero(each.ids != pad_id).tolist(), default=0)
            ends.append(start + last)
        return hidden[torch.tensor(ends, device=hidden.device)]

    return last_token


def mean_of_tokens(hidden: torch.Tensor, _inputs: Sequence[Input], layout: Layout) -> torch.Tensor:
    """A ``Gather``: the mean of each input's tokens, in the dtype of the hidden states."""
    lengths = torch.tensor(layout.lengths, device=hidden.device)
    rows = torch.arange(layout.tokens, device=hidden.device)
    total = functional.embedding_bag(rows, hidden.float(), lengths.cumsum(0) - lengths, mode="sum")
    return (total / lengths[:, None]).to(hidden.dtype)


def _last(hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    lengths = torch.tensor(layout.lengths, device=hidden.device)
    return hidden[lengths.cumsum(0) - 1]
