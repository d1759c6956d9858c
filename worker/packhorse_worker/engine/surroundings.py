"""Keeps what the caller of the Python API has switched on in torch from reaching the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """Within this context torch computes in the tensors' own number formats, and makes new tensors on the CPU.

    Autocast would round float32 to another format, and a default device of the caller's would get tensors that belong to ours.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
