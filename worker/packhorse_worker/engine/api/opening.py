"""From the constructor arguments of ``Encoder`` to a loaded model. The calling process stays as it was, but for its threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from packhorse_shared.cores import usable_cores
from packhorse_shared.errors import SettingsError
from packhorse_shared.model_folder import find_folder, served_names
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.api.arguments import check_show_progress, find_device, read_settings
from packhorse_worker.engine.files.model_folder import ModelFolder, read_model_folder
from packhorse_worker.engine.load import Device, load_runner
from packhorse_worker.engine.runner import Runner
from packhorse_worker.engine.surroundings import undisturbed


@dataclass(frozen=True)
class Opened:
    """A loaded model, and what it was loaded from."""

    runner: Runner
    folder: ModelFolder
    settings: ModelSettings


def open_model(given: Mapping[str, Any], device: str | torch.device, show_progress: bool | None) -> Opened:
    """Load the model that the arguments name. For ``show_progress`` see ``load_runner``.

    Raises ValueError naming an argument, and ModelFilesError naming a file.
    """
    try:
        check_show_progress(show_progress)
        settings, batching = read_settings(given)
        place = Device(find_device(device), workers=1)
        _bound_threads()
        folder = read_model_folder(find_folder(settings, weights=True), settings)
        current = torch.cuda.device(place.torch_device) if place.torch_device.type == "cuda" else nullcontext()
        with _library_logging_kept(), undisturbed(place.torch_device.type), current:
            name = served_names(settings)[0]
            runner = load_runner(folder, name, settings, batching, place, show_progress=show_progress)
            return Opened(runner, folder, settings)
    except SettingsError as problem:
        raise ValueError(str(problem)) from None


def _bound_threads() -> None:
    """torch counts the machine's cores, of which a container may have few; who set fewer threads keeps them."""
    cores = usable_cores()
    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


@contextmanager
def _library_logging_kept() -> Iterator[None]:
    """Loading quiets transformers, which the caller may want to hear again."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
