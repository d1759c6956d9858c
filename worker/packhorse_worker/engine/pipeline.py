"""A model folder as one function: token ids in, vectors out. One padded forward of the transformer, then its parts in order.

Everything behind the transformer runs in float32, whatever the transformer's dtype: it costs nothing and keeps bfloat16
vectors at unit length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.model_folder import ModelFolder
from packhorse_worker.engine.modules import Dense, LayerNorm, Normalize, Part, Pooling
from packhorse_worker.engine.pooling import pool
from packhorse_worker.engine.transformer import embedding_rows, forward_arguments
from packhorse_worker.engine.weights import find_weights


class Pipeline:
    """A transformer with its pooling and the parts behind it, on one device."""

    def __init__(
        self, transformer: nn.Module, pooling: Pooling, parts: nn.Sequential, pad_id: int, device: torch.device
    ) -> None:
        self.transformer = transformer
        self._pooling = pooling
        self._parts = parts
        self._pad_id = pad_id
        self._arguments = forward_arguments(transformer)
        self.device = device
        config: Any = transformer.config
        self._has_token_types = "token_type_ids" in self._arguments and getattr(config, "type_vocab_size", 0) > 0

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding table: ids are valid from 0 up to this, exclusive."""
        return embedding_rows(self.transformer)

    @torch.inference_mode()
    def forward(self, ids: Sequence[NDArray[np.int32]], prompt_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Vectors of these inputs, shape (inputs, dimension), not looked at for NaN.

        ``ids``: at least one array, none empty. ``prompt_tokens``: leading tokens of each that belong to a prompt.
        """
        lengths = torch.tensor([len(each) for each in ids])
        padded = np.full((len(ids), int(lengths.max())), self._pad_id, dtype=np.int64)
        for row, each in zip(padded, ids, strict=True):
            row[: len(each)] = each
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(padded).to(self.device),
            "attention_mask": mask.long().to(self.device),
        }
        if self._has_token_types:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        if "use_cache" in self._arguments:
            inputs["use_cache"] = False
        output = self.transformer(**inputs)
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        pooled = pool(hidden, lengths.to(self.device), torch.tensor(list(prompt_tokens), device=self.device), self._pooling)
        vectors: NDArray[np.float32] = self._parts(pooled).cpu().numpy()
        return vectors


def build_parts(folder: ModelFolder, settings: ModelSettings, hidden_size: int) -> tuple[nn.Sequential, int]:
    """The parts behind the pooling as float32 modules on the CPU, and the dimension that they give.

    Raises ModelFilesError when a part's weights are missing, cut short or of another size than the vector it gets.
    """
    pooling, *parts = folder.parts
    assert isinstance(pooling, Pooling), folder.parts  # the folder's reader saw to it
    dimension = hidden_size * len(pooling.modes)
    built: list[nn.Module] = []
    for part in parts:
        module, dimension = _build(part, dimension, allow_pickle=settings.allow_pickle_weights)
        built.append(module)
    return nn.Sequential(*built).eval().requires_grad_(requires_grad=False), dimension


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors, p=2, dim=-1)


class _Dense(nn.Module):
    """Its attributes are named as the tensors in the files are."""

    def __init__(self, part: Dense) -> None:
        super().__init__()
        self.linear = nn.Linear(part.in_features, part.out_features, bias=part.bias)
        self.activation = getattr(nn, part.activation)()
        self.use_residual = part.use_residual
        if part.use_residual and part.in_features != part.out_features:
            self.residual = nn.Linear(part.in_features, part.out_features, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.linear(vectors))
        if not self.use_residual:
            return result
        return result + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class _LayerNorm(nn.Module):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dimension)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(vectors)
        return result


def _build(part: Part, dimension: int, *, allow_pickle: bool) -> tuple[nn.Module, int]:
    """The module of a part that gets vectors of ``dimension``, and the dimension that it gives."""
    match part:
        case Normalize():
            return _Normalize(), dimension
        case Dense():
            _check_size(part.folder, "in_features", part.in_features, dimension)
            return _filled(_Dense(part), part.folder, allow_pickle=allow_pickle), part.out_features
        case LayerNorm():
            _check_size(part.folder, "dimension", part.dimension, dimension)
            return _filled(_LayerNorm(part.dimension), part.folder, allow_pickle=allow_pickle), dimension
        case Pooling():
            raise AssertionError("a pooling stands first only")  # the folder's reader saw to it


def _check_size(folder: Path, name: str, declared: int, actual: int) -> None:
    if declared != actual:
        raise ModelFilesError(f"{folder / 'config.json'}: {name} is {declared}, but the vector it gets has {actual} values")


def _filled(module: nn.Module, folder: Path, *, allow_pickle: bool) -> nn.Module:
    """The module with its weights, every tensor of it and no other."""
    (path,) = find_weights(folder, allow_pickle=allow_pickle)[:1]
    try:
        if path.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        module.load_state_dict(tensors)
    except Exception as problem:
        # load_state_dict and the two readers raise half a dozen types for files that do not fit.
        raise ModelFilesError(f"{path} does not fit its config.json: {' '.join(str(problem).split())[:300]}") from None
    return module.float()
