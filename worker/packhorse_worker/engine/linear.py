"""A linear layer on oneDNN with a weight that is packed once, where that is right and not slower on this machine.

torch hands a float32 ``nn.Linear`` to MKL, which leaves half of some CPUs unused, and packs a bfloat16 weight again at every
call. oneDNN's inner product with a prepacked weight does neither, and applies the activation while the result is still in the
cache. torch has it under ``torch.ops.mkldnn``, where its own compiler uses it; the names there are private, so nothing here
may depend on them: whatever is missing, raises or gives other numbers leaves the layer as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""That oneDNN has packed weights for."""
_TRIAL_OPERATIONS = 2e8
"""Floating-point operations of one timed call: well under a millisecond on two cores."""
_TRIAL_ROWS = (64, 512)
_TRIAL_ROUNDS = 9
_BENEFIT_OF_DOUBT = 1.1
"""How much slower a packed layer may look: where the two are close, noise would decide, and workers that chose differently give
the same input slightly different vectors."""
CHECK_ROWS = 5
"""Of random values that show whether two layers are the same."""
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Largest difference from ``nn.Linear``, as a share of the largest value: another order of summing, one rounding for two."""


@dataclass(frozen=True)
class Fusion:
    """An activation in oneDNN's words, and in torch's."""

    attr: str
    algorithm: str
    reference: Callable[[torch.Tensor], torch.Tensor]


PLAIN = Fusion("none", "", lambda values: values)
_FUSIONS = (
    Fusion("gelu", "none", functional.gelu),
    Fusion("gelu", "tanh", lambda values: functional.gelu(values, approximate="tanh")),
    Fusion("relu", "", functional.relu),
    Fusion("swish", "", functional.silu),
)


_faster: dict[tuple[Any, ...], bool] = {}
"""What was measured in this process: two copies of a model must not differ in their last bits by the luck of a measurement."""


class OneDnnLinear(nn.Module):
    """``y = activation(x W^T + b)`` for ``x`` (..., in_features), giving (..., out_features), with a prepacked ``W``.

    ``weight`` is the packed tensor: it tells its dtype, shape and device, and any arithmetic on it raises. Raises RuntimeError
    where this build of torch cannot pack.
    """

    def __init__(self, linear: nn.Linear, tokens: int, fusion: Fusion = PLAIN) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), tokens)
        self.bias = linear.bias
        self._fusion = fusion

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """One call of oneDNN: bias and activation are applied inside."""
        fusion = self._fusion
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self.weight, self.bias, fusion.attr, [], fusion.algorithm
        )
        return result

    def extra_repr(self) -> str:
        """As ``nn.Linear`` has it, with the activation."""
        return f"in_features={self.in_features}, out_features={self.out_features}, activation={self._fusion.attr}"


def packed_linear(linear: nn.Linear, tokens: int, fusion: Fusion = PLAIN) -> OneDnnLinear | None:
    """The packed layer, if this machine has it, it gives the same numbers, and it is not clearly slower.

    ``tokens`` is the usual number of rows that it will get.
    """
    try:
        packed = OneDnnLinear(linear, tokens, fusion)
        values = random_rows(linear, CHECK_ROWS)
        if not agree(packed(values), fusion.reference(linear(values))):
            return None
        return packed if _is_faster(linear, packed, fusion, tokens) else None
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return None  # no such operation in this build, or not for this dtype on this CPU


def _is_faster(linear: nn.Linear, packed: OneDnnLinear, fusion: Fusion, tokens: int) -> bool:
    """Timed once for every shape: the shortest of a few alternating calls, since other processes only ever add time."""
    weight = linear.weight
    key = (*weight.shape, weight.dtype, linear.bias is None, fusion.attr, fusion.algorithm)
    if key not in _faster:
        fewest, most = _TRIAL_ROWS
        rows = min(max(int(_TRIAL_OPERATIONS / (2 * weight.numel())), fewest), most, max(tokens, 1))
        values = random_rows(linear, rows)
        packed(values)
        linear(values)
        plain_s, packed_s = [], []
        for _ in range(_TRIAL_ROUNDS):
            plain_s.append(_seconds(lambda: fusion.reference(linear(values))))
            packed_s.append(_seconds(lambda: packed(values)))
        _faster[key] = min(packed_s) < _BENEFIT_OF_DOUBT * min(plain_s)
    return _faster[key]


def fusion_of(activation: nn.Module) -> Fusion | None:
    """What oneDNN calls this activation. Found by its values, since transformers has several classes for most of them."""
    points = torch.linspace(-9.0, 9.0, 1001)
    try:
        values = activation(points)
    except (RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(values, torch.Tensor) or values.shape != points.shape:
        return None
    close = (fusion for fusion in _FUSIONS if (fusion.reference(points) - values).abs().max() < 2e-6)
    return next(close, None)


def random_rows(linear: nn.Linear, rows: int) -> torch.Tensor:
    """Values for a layer, (rows, in_features), always the same."""
    generator = torch.Generator().manual_seed(rows)  # the global one belongs to whoever uses this process
    return torch.randn(rows, linear.in_features, generator=generator).to(linear.weight.dtype)


def agree(values: object, expected: object) -> bool:
    """Whether two outputs are the same but for rounding."""
    if not isinstance(values, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if values.shape != expected.shape or values.dtype != expected.dtype:
        return False
    largest = max(float(expected.float().abs().max()), 1e-3)
    return float((values.float() - expected.float()).abs().max()) <= _TOLERANCE[expected.dtype] * largest


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
