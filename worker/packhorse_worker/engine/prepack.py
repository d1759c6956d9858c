"""Puts packed linear layers into a model on a CPU: activations inside them, projections joined, and only what stays right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from packhorse_worker.engine.joined import PROJECTIONS, joined_linear, parts_of
from packhorse_worker.engine.linear import (
    CHECK_ROWS,
    PACKED_DTYPES,
    PLAIN,
    Fusion,
    agree,
    fusion_of,
    packed_linear,
    random_rows,
)
from packhorse_worker.engine.trial import Opaque, Swaps

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


def prepack_linears(model: nn.Module, dtype: torch.dtype, tokens: int, works: Callable[[], bool] = lambda: True) -> int:
    """Replace the ``nn.Linear`` modules inside ``model`` by packed ones where that is faster here; returns how many it was.

    ``model`` is on the CPU, in evaluation mode, with frozen weights of ``dtype``; ``tokens`` is the usual size of a forward.
    A well-known activation behind a layer moves into it, and projections of one input to query, key and value become one.
    Afterwards the model takes inputs of any shape as before, the old weights are gone, and its ``state_dict`` lacks them.
    Layers that share their weight, have hooks, or give the logits of a language model stay as they are. ``works`` tells whether
    the model gives what it should. It is asked before anything is packed: where the model computes with weights instead of
    calling their layers, nothing is; where it changes an input between its projections, they stay apart.
    """
    if dtype not in PACKED_DTYPES:
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
        packed = self._packed(linear, PLAIN)
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
        fusion = fusion_of(activation)
        packed = None if fusion is None else self._packed(linear, fusion)
        if packed is None:
            return
        values = random_rows(linear, CHECK_ROWS)[None]
        try:
            before = run(values)
            setattr(parent, name, packed)
            setattr(parent, activation_name, nn.Identity())
            if agree(run(values), before):
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
            and weight.dtype in PACKED_DTYPES
            and weight.device.type == "cpu"
            and weight.numel() > 0
            and not (linear._forward_hooks or linear._forward_pre_hooks)
        )

    def _put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        setattr(parent, name, module)

    def _packed_together(self, linears: Sequence[nn.Linear]) -> nn.Module | None:
        return self._packed(joined_linear(linears), PLAIN)

    def _packed(self, linear: nn.Linear, fusion: Fusion) -> nn.Module | None:
        return packed_linear(linear, self._tokens, fusion)


class _Trial(_Packer):
    """Puts stand-ins where a ``_Packer`` would put packed layers."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__(model, tokens)
        self.swaps = Swaps()

    def _put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.swaps.put(parent, name, module)

    def _packed_together(self, linears: Sequence[nn.Linear]) -> nn.Module:
        return Opaque(linears)

    def _packed(self, linear: nn.Linear, fusion: Fusion) -> nn.Module:
        return Opaque([linear])


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that gives a language model's logits: large, often tied, and rerankers read single rows of it."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        return find() if callable(find) else None
    except (NotImplementedError, AttributeError):
        return None
