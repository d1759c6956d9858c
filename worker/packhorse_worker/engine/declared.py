"""The tensors that a ``cuda_graph_config`` declares for the model: what a call gives must be as its graphs were captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.extra_inputs import EMBEDDINGS, EncodeExtraInputSpec
from packhorse_shared.graph_config import GraphConfigError, read_graph_config
from packhorse_shared.values import kind

_SETTING = "cuda_graph_config.extra_model_inputs"
_MEANING = {"num_tokens": "the tokens of all inputs", "batch_size": "the number of inputs"}


class Declared:
    """Specifications by name. All ValueErrors name the argument and say what is right."""

    def __init__(self, specs: Iterable[EncodeExtraInputSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}

    @classmethod
    def of(cls, config: Any) -> Self:
        """What a ``cuda_graph_config`` declares, perhaps nothing."""
        return cls(read_graph_config(config).extra_model_inputs)

    def check_taken(self, takes: Callable[[str], bool], embedding_width: int) -> None:
        """Raise GraphConfigError for a declared tensor that the model's forward has no argument for, and for embeddings of
        another width than its table's."""
        for name in self._specs:
            if not takes(name):
                raise GraphConfigError(None, f"{name} is not an argument of this model's forward", _SETTING)
        embeddings = self._specs.get(EMBEDDINGS)
        if embeddings is not None and embeddings.shape[1] != embedding_width:
            raise GraphConfigError(
                None,
                f"{EMBEDDINGS} has {embeddings.shape[1]} numbers for each token; this model's embedding table has the "
                f'width {embedding_width}: declare ("num_tokens", {embedding_width})',
                _SETTING,
            )

    def find(self, name: str, value: torch.Tensor | NDArray[Any] | None) -> EncodeExtraInputSpec | None:
        """What is declared of a tensor. Raises ValueError where that is nothing; without a ``value`` that is None."""
        if name in self._specs or value is None:
            return self._specs.get(name)
        known = f"; declared are {', '.join(self._specs)}" if self._specs else ""
        raise ValueError(
            f"{name} is a tensor that {_SETTING} does not declare{known}; declare it, with its shape and dtype "
            f"{dtype_name(value.dtype)}, or make the Encoder without cuda_graph_config"
        )

    def check_constant(self, name: str, value: Any) -> None:
        """Raise ValueError for what is no tensor and declared as one."""
        spec = self._specs.get(name)
        if spec is not None:
            raise ValueError(f"{name} is {kind(value)}; give a torch tensor or a numpy array, {_right(spec)}")

    def check_all_given(self, names: Collection[str]) -> None:
        """Raise ValueError for a declared tensor that is missing."""
        for name, spec in self._specs.items():
            if name not in names:
                raise ValueError(f"{name} is missing: {_SETTING} declares it; give a tensor, {_right(spec)}")

    @staticmethod
    def check(spec: EncodeExtraInputSpec, value: torch.Tensor | NDArray[Any], *, num_tokens: int, batch_size: int) -> None:
        """Raise ValueError for a tensor that is not as declared, in a call of so many tokens and inputs."""
        found = dtype_name(value.dtype)
        if found != spec.dtype:
            raise ValueError(f"{spec.name} holds {found}; {_SETTING} declares {spec.dtype}, {_right(spec)}")
        if value.ndim != len(spec.shape):
            raise ValueError(
                f"{spec.name} has {value.ndim} dimensions, shape {tuple(value.shape)}; {_SETTING} declares {len(spec.shape)}, "
                f"{_right(spec)}"
            )
        for axis, (size, right) in enumerate(zip(value.shape, spec.sizes(num_tokens, batch_size), strict=True)):
            if size == right:
                continue
            word = spec.shape[axis]
            meaning = f" ({word}, {_MEANING[word]})" if isinstance(word, str) else ""
            raise ValueError(
                f"{spec.name} has the shape {tuple(value.shape)}; dimension {axis} is {size} and must be {right}{meaning}"
            )


def dtype_name(of_torch: Any) -> str:
    """A number format by torch's name, which numpy's are too; of other objects of torch, what is behind ``torch.``."""
    return of_torch.name if isinstance(of_torch, np.dtype) else str(of_torch).removeprefix("torch.")


def _right(spec: EncodeExtraInputSpec) -> str:
    return f"shape ({', '.join(map(str, spec.shape))}{',' * (len(spec.shape) == 1)}) of {spec.dtype}"
