"""The constructor arguments of ``Encoder`` as settings and a device: the same names, bounds and words as the command line's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from packhorse_shared.graph_config import read_graph_config
from packhorse_shared.load import allowed
from packhorse_shared.settings import BatchingSettings, Flag, ModelSettings, flags
from packhorse_shared.values import quoted, whole_number


def read_settings(given: Mapping[str, Any]) -> tuple[ModelSettings, BatchingSettings]:
    """Settings of what was given by name. Raises ValueError naming the argument and what it takes."""
    known = flags()
    sections: dict[str, dict[str, Any]] = {"model": {}, "batching": {}}
    for name, value in given.items():
        sections[known[name].section][name] = _read(known[name], value)
    return ModelSettings(**sections["model"]), BatchingSettings(**sections["batching"])


def find_device(asked: str | torch.device) -> torch.device:
    """The device of ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or a torch.device. Raises ValueError when there is none such."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device: {quoted(asked)} is not allowed; give auto, cpu, cuda, or cuda:1 for the second one"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device: {device} is not supported; give auto, cpu, cuda, or cuda:1 for the second one")
    if not torch.cuda.is_available():
        raise ValueError(f"device: {device} was asked for, but torch finds no CUDA device; give cpu or auto")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device: there is no {device}; torch finds {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def check_show_progress(value: Any) -> None:
    """Raise ValueError for what is not True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"show_progress: {quoted(value)} is not allowed; give True, False or None")


def _read(flag: Flag, value: Any) -> Any:
    if flag.yaml_only:
        return value if value is None else read_graph_config(value, flag.name).to_dict()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    number = whole_number(value)
    try:
        found = msgspec.convert(value if number is None else number, flag.type)
    except msgspec.ValidationError:
        raise ValueError(f"{flag.name}: {quoted(value)} is not allowed; give {allowed(flag)}") from None
    if found == "":
        raise ValueError(f"{flag.name} is empty; leave it out for the default, or give {allowed(flag)}")
    return found
