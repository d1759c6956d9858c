"""What turns a cross-encoder's logits into scores, found as sentence-transformers finds it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.files.companion import Saved
from packhorse_worker.engine.files.json_file import typed
from packhorse_worker.engine.files.modules import ACTIVATIONS

log = logging.getLogger(__name__)


def read_activation(saved: Saved, config: dict[str, Any], path: Path, scores: int, *, trusted: bool) -> str:
    """The name of a class in ``torch.nn``, one of ``ACTIVATIONS``; without a declaration Sigmoid for one score, else Identity.

    Declared in config_sentence_transformers.json, else in config.json (``path``), where versions before 4.0 had another key.
    A class that is not torch's is passed over with a warning, unless the model's own code is ``trusted``: then its scores
    would be other ones than the model's. Raises ModelFilesError naming the file for that and for an unknown class of torch.
    """
    own = _declared_in_config(config, path)
    for place, declared in ((saved.path, saved.activation), (path, own)):
        if declared is None:
            continue
        package, _, name = declared.rpartition(".")
        if f"{package}.".startswith("torch.nn.") and name in ACTIVATIONS:
            return name
        if declared.startswith("torch.") or trusted:
            raise ModelFilesError(
                f"{place}: the activation {declared} is not served; known are torch.nn's {', '.join(sorted(ACTIVATIONS))}"
            )
        log.warning(
            "the model's activation is not one of torch's, so that the default is used",
            extra={"activation": declared, "file": str(place), "default": _default(scores)},
        )
    return _default(scores)


def is_declared(config: dict[str, Any], path: Path) -> bool:
    """Whether config.json names an activation, which only cross-encoders do."""
    return _declared_in_config(config, path) is not None


def _declared_in_config(config: dict[str, Any], path: Path) -> str | None:
    section = typed(config, "sentence_transformers", dict, {}, path)
    old = typed(config, "sbert_ce_default_activation_function", str, None, path)
    found: str | None = typed(section, "activation_fn", str, old, path)
    return found


def _default(scores: int) -> str:
    return "Sigmoid" if scores == 1 else "Identity"
