"""The ways to compute attention that work on a device."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from packhorse_worker.engine.attention.kernels import Kernel, installed_kernels
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.attention.runs import ByRuns
from packhorse_worker.engine.attention.varlen import Varlen
from packhorse_worker.engine.attention.way import Pattern, Scope, Way
from packhorse_worker.engine.packing import Shape, layout_of
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_FLASH_CAPABILITY = (8, 0)
_TRIED = (layout_of([5, 1, 12]), Shape(num_tokens=20, batch_size=4, seq_len=16))
"""With rows and a slot that belong to no input."""
_TRIED_HEADS, _TRIED_SIZE, _TRIED_WINDOW, _TRIED_SCALE = (4, 2, 2), 64, 4, 0.2
_TOLERANCE = 0.03
"""Of the largest value. bfloat16 rounds by less than 0.01, and a token too many or too few makes more."""


def ways_for(device: torch.device, dtype: torch.dtype) -> list[Way]:
    """The ways that work there, best first; the last one computes everything.

    Kernels are tried out on the device, so that one that is not built for it, or wrong on it, is left out here and not found by
    users.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY:
        return [ByRuns()]
    found = (first_that_works(kernels, device, dtype) for kernels in installed_kernels())
    return [*(each for each in found if each is not None), ByRuns()]


def graphable_way(ways: Sequence[Way]) -> Way:
    """The way for CUDA graphs: the best one in use that a graph can hold."""
    return next((each for each in ways if each.is_graphable), Rectangle())


def first_that_works(kernels: Sequence[Kernel], device: torch.device, dtype: torch.dtype) -> Varlen | None:
    """Of the ways to call a kernel the first that gives what SDPA gives; None, and a line in the log, where none does."""
    if dtype not in kernels[0].dtypes:
        return None
    problems = []
    for kernel in kernels:
        way = Varlen(kernel)
        problem = _problem(way, device, dtype, windows=(None, _TRIED_WINDOW) if kernel.takes_window else (None,))
        if problem is None:
            return way
        problems.append(problem)
    log.info("an attention kernel is not used", extra={"kernel": kernels[0].name, "reason": problems[0]})
    return None


def _problem(way: Way, device: torch.device, dtype: torch.dtype, windows: Sequence[int | None]) -> str | None:
    """What is wrong with a way on a device, in a line; None where it gives the numbers of SDPA in float32."""
    layout, shape = _TRIED
    random = torch.Generator().manual_seed(7)
    made = [torch.randn(1, count, shape.num_tokens, _TRIED_SIZE, generator=random) for count in _TRIED_HEADS]
    for each in made:
        each[:, :, layout.tokens :] = torch.nan
    tensors = [each.to(device, dtype) for each in made]
    exact = [each.float() for each in tensors]
    for causal, window in itertools.product((False, True), windows):
        try:
            found = _attend(way, tensors, Pattern(_TRIED_SCALE, causal, window))
        except Exception as problem:
            return f"{type(problem).__name__}: {first_line(problem)}"
        wanted = _attend(ByRuns(), exact, Pattern(_TRIED_SCALE, causal, window))
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        if not difference <= _TOLERANCE:
            return f"differs from SDPA by {difference:.2g} of the largest value, causal {causal}, window {window}"
    return None


def _attend(way: Way, tensors: Sequence[torch.Tensor], pattern: Pattern) -> torch.Tensor:
    """Attention over ``_TRIED``, (tokens, heads, head size) in float32."""
    layout, shape = _TRIED
    query, key, value = tensors
    arrays = {name: torch.from_numpy(each).to(query.device) for name, each in way.arrays(layout, shape).items()}
    scope = Scope(way, shape, arrays, layout)
    return way.attend((query, key, value), scope, pattern)[0, : layout.tokens].float()
