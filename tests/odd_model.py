"""A model as it comes with code of its own (auto_map): a small encoder whose ``oddity`` says what is unusual about it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput, TokenClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OddConfig(PretrainedConfig):  # type: ignore[misc,no-untyped-call]
    """``oddity``: none, own_attention, reads_weights, changes_input, other_inputs, merges_rows, dropout, or draws_again."""

    model_type = "odd"

    def __init__(self, oddity: str = "none", **others: Any) -> None:
        self.vocab_size, self.hidden_size, self.heads, self.max_position_embeddings = 128, 32, 4, 64
        self.oddity = oddity
        super().__init__(**{"pad_token_id": 0, **others})


class _Heads(nn.Module):
    is_causal = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.q_proj, self.k_proj, self.v_proj, self.out = [nn.Linear(32, 32) for _ in range(4)]

    def forward(self, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads = [self._split(each) for each in self._project(values)]
        attend = _attend
        if self.config.oddity != "own_attention" and self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output = self.out(attend(self, *heads, mask, scaling=8**-0.5)[0].reshape(values.shape))
        return functional.dropout(output, 0.5, training=self.config.oddity == "dropout")

    def _project(self, values: torch.Tensor) -> list[torch.Tensor]:
        layers = [self.q_proj, self.k_proj, self.v_proj]
        if self.config.oddity == "reads_weights":
            weight, bias = torch.cat([each.weight for each in layers]), torch.cat([each.bias for each in layers])
            return list(functional.linear(values, weight, bias).chunk(3, dim=-1))
        if self.config.oddity == "changes_input":
            values = values.clone()
            query = self.q_proj(values)
            values.mul_(2)
            return [query, self.k_proj(values), self.v_proj(values)]
        if self.config.oddity == "other_inputs":
            return [self.q_proj(values), self.k_proj(2 * values), self.v_proj(values)]
        return [each(values) for each in layers]

    def _split(self, values: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = values.shape
        if self.config.oddity == "merges_rows":
            values = values.view(-1, 8)
        return values.view(batch, rows, 4, 8).transpose(1, 2)


def _attend(_: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **__: Any) -> tuple[torch.Tensor, None]:
    scores = query @ key.mT * scaling
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class _OddPreTrained(PreTrainedModel):  # type: ignore[misc]
    config_class = OddConfig
    base_model_prefix = "odd"
    _supports_sdpa = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(0, 0.2)

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        found = super().from_pretrained(*arguments, **options)
        model = found[0] if isinstance(found, tuple) else found
        if model.config.oddity == "draws_again":  # as transformers 5.0 does with every model whose _init_weights is like ours
            model.apply(model._init_weights)
        return found


class OddModel(_OddPreTrained):
    """Two layers; makes its mask itself where it is given one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tokens, self.positions = nn.Embedding(128, 32), nn.Embedding(64, 32)
        self.layers, self.norm = nn.ModuleList([_Heads(config) for _ in range(2)]), nn.LayerNorm(32)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        values = self.tokens(input_ids) + self.positions(position_ids)
        mask = None if attention_mask is None else (1 - attention_mask[:, None, None].float()) * -1e30
        for layer in self.layers:
            values = self.norm(values + layer(values, mask))
        return BaseModelOutput(last_hidden_state=values)


class OddForSequenceClassification(_OddPreTrained):
    """Reads the first token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.odd, self.classifier = OddModel(config), nn.Linear(32, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        return SequenceClassifierOutput(logits=self.classifier(self.odd(input_ids, attention_mask).last_hidden_state[:, 0]))


class OddForTokenClassification(_OddPreTrained):
    """Its head looks at a token's neighbours too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.odd, self.head = OddModel(config), nn.Conv1d(32, config.num_labels, 3, padding=1)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        return TokenClassifierOutput(logits=self.head(self.odd(input_ids, attention_mask).last_hidden_state.mT).mT)
