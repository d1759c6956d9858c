"""On a CPU: linear layers on oneDNN with weights packed once at load, where that is faster on this machine.

torch hands a float32 ``nn.Linear`` to MKL, which leaves half of some CPUs unused, and packs a bfloat16 weight again at every
call. oneDNN's inner product with a prepacked weight does neither, and applies the activation while the result is still in the
cache. torch has it under ``torch.ops.mkldnn``, where its own compiler uses it; the names there are private, so nothing here
may depend on them: whatever is missing, raises or gives other numbers leaves the layer as it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from packhorse_worker.engine.joined import PROJECTIONS, joined_linear, parts_of
from packhorse_worker.engine.trial import Opaque, Swaps

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_TRIAL_OPERATIONS = 2e8
"""Floating-point operations of one timed call: well under a millisecond on two cores."""
_TRIAL_ROWS = (64, 512)
_TRIAL_ROUNDS = 9
_BENEFIT_OF_DOUBT = 1.1
"""How much slower a packed layer may look: where the two are close, noise would decide, and workers that chose differently give
the same input slightly different vectors."""
_CHECK_ROWS = 5
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
"""Largest difference from ``nn.Linear``, as a share of the largest value: another order of summing, one rounding for two."""
_READ_DIRECTLY = frozenset({"in_proj"})
"""Layers whose weight the model slices instead of calling the layer (the first DeBERTa)."""

_PAIRS = (
    # the linear layer, the activation after it and nothing else, the parent's method that calls both
    ("dense", "intermediate_act_fn", "forward"),  # BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, MPNet, DeBERTa
    ("lin1", "activation", "forward"),  # DistilBERT
    ("ffn", "activation", "ff_chunk"),  # ALBERT
    ("fc1", "activation_fn", "forward"),  # Jina v3
    ("wi", "act", "forward"),  # T5 without gates
)


@dataclass(frozen=True)
class _Fusion:
    """An activation in oneDNN's words, and in torch's."""

    attr: str
    algorithm: str
    reference: Callable[[torch.Tensor], torch.Tensor]


_PLAIN = _Fusion("none", "", lambda values: values)
_FUSIONS = (
    _Fusion("gelu", "none", functional.gelu),
    _Fusion("gelu", "tanh", lambda values: functional.gelu(values, approximate="tanh")),
    _Fusion("relu", "", functional.relu),
    _Fusion("swish", "", functional.silu),
)


_faster: dict[tuple[Any, ...], bool] = {}
"""What was measured in this process: two copies of a model must not differ in their last bits by the luck of a measurement."""


class OneDnnLinear(nn.Module):
    """``y = activation(x W^T + b)`` for ``x`` (..., in_features), giving (..., out_features), with a prepacked ``W``.

    ``weight`` is the packed tensor: it tells its dtype, shape and device, and any arithmetic on it raises. Raises RuntimeError
    where this build of torch cannot pack.
    """

    def __init__(self, linear: nn.Linear, tokens: int, fusion: _Fusion = _PLAIN) -> None:
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


def prepack_linears(model: nn.Module, dtype: torch.dtype, tokens: int, works: Callable[[], bool] = lambda: True) -> int:
    """Replace the ``nn.Linear`` modules inside ``model`` by packed ones where that is faster here; returns how many it was.

    ``model`` is on the CPU, in evaluation mode, with frozen weights of ``dtype``; ``tokens`` is the usual size of a forward.
    A well-known activation behind a layer moves into it, and projections of one input to query, key and value become one.
    Afterwards the model takes inputs of any shape as before, the old weights are gone, and its ``state_dict`` lacks them.
    Layers that share their weight, have hooks, or give the logits of a language model stay as they are. ``works`` tells whether
    the model gives what it should. It is asked before anything is packed: where the model computes with weights instead of
    calling their layers, nothing is; where it changes an input between its projections, they stay apart.
    """
    if dtype not in _PACKED_DTYPES:
        return 0
    with torch.no_grad():
        joins = _works_so(model, tokens, works, joins=True)
        if not joins and not _works_so(model, tokens, works, joins=False):
            return 0
        packer = _Packer(model, tokens)
        for parent in list(model.modules()):
            for names in _PAIRS:
                packer.fuse(parent, *names)
            for projections in PROJECTIONS if joins else ():
                packer.join(parent, projections)
        packer.replace_all(model)
    return packer.replaced


def _works_so(model: nn.Module, tokens: int, works: Callable[[], bool], *, joins: bool) -> bool:
    """Whether the model works with layers like the packed ones."""
    trial = _Trial(model, tokens)
    try:
        for parent in list(model.modules()):
            for projections in PROJECTIONS if joins else ():
                trial.join(parent, projections)
        trial.replace_all(model)
        return works()
    finally:
        trial.swaps.undo()


class _Packer:
    """Replaces layers one at a time, so that old and new weights of only one of them are in memory together."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
        parents = Counter(id(child) for parent in model.modules() for child in parent.children())
        self._shared_weights = {key for key, count in uses.items() if count > 1}
        self._shared_modules = {key for key, count in parents.items() if count > 1}
        self._logits = _output_layer(model)
        self._tokens = tokens
        self.replaced = 0

    def replace_all(self, model: nn.Module) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    self.replace(parent, name, child)

    def replace(self, parent: nn.Module, name: str, linear: nn.Linear) -> None:
        if not self._may_replace(linear, name):
            return
        packed = self._packed(linear, _PLAIN)
        if packed is not None:
            self._put(parent, name, packed)
            self.replaced += 1

    def join(self, parent: nn.Module, names: tuple[str, ...]) -> None:
        """Replace projections of the same input by parts of one layer."""
        linears = [getattr(parent, name, None) for name in names]
        layers = [each for each in linears if isinstance(each, nn.Linear) and self._may_replace(each, "")]
        alike = {(each.in_features, each.bias is None, each.weight.dtype) for each in layers}
        if len(layers) < len(names) or len(alike) > 1:
            return
        packed = self._packed_together(layers)
        if packed is not None:
            for name, part in zip(names, parts_of(packed, layers), strict=True):
                self._put(parent, name, part)
            self.replaced += len(names)

    def fuse(self, parent: nn.Module, name: str, activation_name: str, method: str) -> None:
        """Replace a layer together with the activation behind it; leaves both when the parent then gives other numbers."""
        linear, activation = getattr(parent, name, None), getattr(parent, activation_name, None)
        run = getattr(parent, method, None)
        if run is None or not isinstance(activation, nn.Module) or id(activation) in self._shared_modules:
            return
        if not isinstance(linear, nn.Linear) or not self._may_replace(linear, name):
            return
        fusion = _fusion_of(activation)
        packed = None if fusion is None else self._packed(linear, fusion)
        if packed is None:
            return
        values = _random_rows(linear, _CHECK_ROWS)[None]
        try:
            before = run(values)
            setattr(parent, name, packed)
            setattr(parent, activation_name, nn.Identity())
            if _agree(run(values), before):
                self.replaced += 1
                return
        except Exception:  # noqa: S110 (whatever it is: a parent of another kind that happens to use these names)
            pass
        setattr(parent, name, linear)
        setattr(parent, activation_name, activation)

    def _may_replace(self, linear: nn.Linear, name: str) -> bool:
        weight = linear.weight
        return (
            type(linear) is nn.Linear
            and linear is not self._logits
            and name not in _READ_DIRECTLY
            and id(linear) not in self._shared_modules
            and id(weight) not in self._shared_weights
            and weight.dtype in _PACKED_DTYPES
            and weight.device.type == "cpu"
            and weight.numel() > 0
            and not (linear._forward_hooks or linear._forward_pre_hooks)
        )

    def _put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        setattr(parent, name, module)

    def _packed_together(self, linears: Sequence[nn.Linear]) -> nn.Module | None:
        return self._packed(joined_linear(linears), _PLAIN)

    def _packed(self, linear: nn.Linear, fusion: _Fusion) -> nn.Module | None:
        """The packed layer, if this machine has it, it is right, and it is faster."""
        try:
            packed = OneDnnLinear(linear, self._tokens, fusion)
            values = _random_rows(linear, _CHECK_ROWS)
            if not _agree(packed(values), fusion.reference(linear(values))):
                return None
            return packed if self._is_faster(linear, packed, fusion) else None
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            return None  # no such operation in this build, or not for this dtype on this CPU

    def _is_faster(self, linear: nn.Linear, packed: OneDnnLinear, fusion: _Fusion) -> bool:
        """Timed once for every shape: the shortest of a few alternating calls, since other processes only ever add time."""
        weight = linear.weight
        key = (*weight.shape, weight.dtype, linear.bias is None, fusion.attr, fusion.algorithm)
        if key not in _faster:
            fewest, most = _TRIAL_ROWS
            rows = min(max(int(_TRIAL_OPERATIONS / (2 * weight.numel())), fewest), most, max(self._tokens, 1))
            values = _random_rows(linear, rows)
            packed(values)
            linear(values)
            plain_s, packed_s = [], []
            for _ in range(_TRIAL_ROUNDS):
                plain_s.append(_seconds(lambda: fusion.reference(linear(values))))
                packed_s.append(_seconds(lambda: packed(values)))
            _faster[key] = min(packed_s) < _BENEFIT_OF_DOUBT * min(plain_s)
        return _faster[key]


class _Trial(_Packer):
    """Puts stand-ins where a ``_Packer`` would put packed layers."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__(model, tokens)
        self.swaps = Swaps()

    def _put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.swaps.put(parent, name, module)

    def _packed_together(self, linears: Sequence[nn.Linear]) -> nn.Module:
        return Opaque(linears)

    def _packed(self, linear: nn.Linear, fusion: _Fusion) -> nn.Module:
        return Opaque([linear])


def _fusion_of(activation: nn.Module) -> _Fusion | None:
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


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that gives a language model's logits: large, often tied, and rerankers read single rows of it."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        return find() if callable(find) else None
    except (NotImplementedError, AttributeError):
        return None


def _random_rows(linear: nn.Linear, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)  # the global one belongs to whoever uses this process
    return torch.randn(rows, linear.in_features, generator=generator).to(linear.weight.dtype)


def _agree(values: object, expected: object) -> bool:
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
