"""Keeps what the caller of the Python API has switched on in torch from reaching the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import backends

_SHORTER = frozenset({"tf32", "bf16"})
_PRODUCTS = {"cpu": "mkldnn.matmul mkldnn.conv", "cuda": "cuda.matmul cudnn.conv"}
"""What has a ``fp32_precision`` in ``torch.backends``: the format in which the factors of float32 products are read."""


@contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """Within this context torch computes in the tensors' own number formats, and makes new tensors on the CPU.

    Autocast would round float32 to another format, and so would the shorter formats that the caller allows for products in
    float32; a default device of the caller's would get tensors that belong to ours. The switches of the process, which other
    threads see too, are touched only where they stand otherwise.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for name in _PRODUCTS.get(device_type, "").split():
            _round_nothing(attrgetter(name)(backends), stack)
        if device_type == "cuda" and backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call] # torch has no types here
            backends.cuda.enable_cudnn_sdp(False)
            stack.callback(backends.cuda.enable_cudnn_sdp, True)
        yield


def settle_cuda() -> None:
    """The same for a worker's whole life, in a process where nobody has switched anything.

    torch's convolutions would round float32 to TF32; its matrix products do not. And torch prefers cuDNN's attention on some
    cards, which makes a plan for every new shape: long for what runs but once.
    """
    backends.cudnn.allow_tf32 = False
    backends.cuda.enable_cudnn_sdp(False)


def _round_nothing(backend: Any, stack: ExitStack) -> None:
    before = backend.fp32_precision
    if before in _SHORTER:
        backend.fp32_precision = "ieee"
        stack.callback(setattr, backend, "fp32_precision", before)
