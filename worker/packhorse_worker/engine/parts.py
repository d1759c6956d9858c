"""The parts of a sentence-transformers pipeline behind the pooling, as float32 modules with the weights of their folders."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.model_folder import ModelFolder
from packhorse_worker.engine.files.modules import Dense, LayerNorm, Normalize, Part, Pooling, SequenceHead, TokenHead, YesNoHead
from packhorse_worker.engine.files.weights import find_weights


def build_parts(folder: ModelFolder, settings: ModelSettings, hidden_size: int) -> tuple[nn.Sequential, int]:
    """The parts behind the pooling as float32 modules on the CPU, and the dimension of the model's output.

    Raises ModelFilesError when a part's weights are missing, cut short or of another size than the vector it gets.
    """
    match folder.head:
        case SequenceHead(labels) | TokenHead(labels):
            return nn.Sequential(), len(labels)
        case YesNoHead():
            return nn.Sequential(), 1
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
