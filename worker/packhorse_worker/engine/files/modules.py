"""The parts of a sentence-transformers pipeline behind the transformer, as its files declare them.

Read from ``modules.json`` and each part's own ``config.json``, in the format of sentence-transformers up to 5.3
(``pooling_mode_mean_tokens: true``, types ``sentence_transformers.models.Pooling``) and from 5.4 on (``pooling_mode: mean``,
types by their full module path). Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.files.json_file import read_object, typed

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

_LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys up to 5.3, in the order in which several modes are concatenated."""

ACTIVATIONS = frozenset(
    {"CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid", "Mish", "ReLU"}
    | {"ReLU6", "SELU", "Sigmoid", "SiLU", "Softplus", "Softsign", "Tanh", "Tanhshrink"}
)
"""Classes of ``torch.nn`` that a Dense part or a cross-encoder may name: each works on single values, without arguments."""


@dataclass(frozen=True)
class Pooling:
    """Token vectors to one vector; several modes are concatenated."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True
    """False leaves the tokens of the prompt out."""


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation, perhaps around a residual connection."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """Name of a class in ``torch.nn``, one of ``ACTIVATIONS``."""
    use_residual: bool
    makes_scores: bool = False
    """Whether it is the last layer of a cross-encoder, and gives its scores."""


@dataclass(frozen=True)
class LayerNorm:
    """A layer normalization of the pooled vector."""

    folder: Path
    dimension: int


@dataclass(frozen=True)
class Normalize:
    """L2 normalization of the vector."""


@dataclass(frozen=True)
class LogitScore:
    """Of a language model's logits behind the last token, one token's, less that of the other."""

    folder: Path
    true_token_id: int
    false_token_id: int | None


Part = Pooling | Dense | LayerNorm | Normalize


@dataclass(frozen=True)
class SequenceHead:
    """The transformer's own classification head: one row of logits for each input (``*ForSequenceClassification``)."""

    labels: tuple[str, ...]
    """In the order of the logits."""
    activation: str
    """Name of a class in ``torch.nn``, one of ``ACTIVATIONS``: what turns logits into scores; ``Identity`` for none."""


@dataclass(frozen=True)
class TokenHead:
    """The transformer's own head on every token: one row of logits for each of them (``*ForTokenClassification``)."""

    labels: tuple[str, ...]
    """In the order of the logits."""


@dataclass(frozen=True)
class YesNoHead:
    """A language model that answers yes or no: the logit of one token behind the input, less that of the other."""

    true_token_id: int
    false_token_id: int | None
    """None: the logit of the true token alone."""
    activation: str
    """Name of a class in ``torch.nn``, one of ``ACTIVATIONS``: what turns the difference into a score."""


Head = SequenceHead | TokenHead | YesNoHead


def read_part(kind: str, folder: Path) -> Part | LogitScore | None:
    """The part of class name ``kind`` whose files are in ``folder``; None for one that does nothing at inference.

    Raises ModelFilesError naming the file that is missing or says what cannot be served; KeyError for an unknown kind.
    """
    path = folder / "config.json"
    match kind:
        case "Pooling":
            return _read_pooling(path)
        case "Dense":
            return _read_dense(path)
        case "LayerNorm":
            return LayerNorm(folder, _needed(read_object(path), "dimension", path))
        case "Normalize":
            if path.is_file():
                _check_names(read_object(path), path)
            return Normalize()
        case "LogitScore":
            return _read_logit_score(path)
        case "Dropout":
            return None
    raise KeyError(kind)


def _read_pooling(path: Path) -> Pooling:
    found = read_object(path)
    declared = found.get("pooling_mode")
    if declared is None:
        declared = [mode for key, mode in _LEGACY_MODES.items() if found.get(key)] or ["mean"]
    modes = [declared] if isinstance(declared, str) else declared
    known = get_args(PoolingMode)
    if not isinstance(modes, list) or not modes or any(mode not in known for mode in modes):
        raise ModelFilesError(f"{path}: pooling_mode {declared!r} is not of {', '.join(known)}")
    return Pooling(tuple(modes), typed(found, "include_prompt", bool, default=True, path=path))


def _read_logit_score(path: Path) -> LogitScore:
    found = read_object(path)
    name = typed(found, "module_input_name", str, "causal_logits", path)
    if name != "causal_logits":
        raise ModelFilesError(f"{path}: module_input_name {name} is not served, only causal_logits is")
    true_id, false_id = (typed(found, f"{word}_token_id", int, None, path) for word in ("true", "false"))
    if true_id is None or min(true_id, 0 if false_id is None else false_id) < 0:
        raise ModelFilesError(f"{path}: true_token_id is {true_id} and false_token_id {false_id}, which are no token ids")
    return LogitScore(path.parent, true_id, false_id)


def _read_dense(path: Path) -> Dense:
    found = read_object(path)
    makes_scores = found.get("module_output_name") == "scores"
    _check_names({key: value for key, value in found.items() if not (makes_scores and key == "module_output_name")}, path)
    activation = typed(found, "activation_function", str, "torch.nn.modules.activation.Tanh", path)
    package, _, name = activation.rpartition(".")
    if not f"{package}.".startswith("torch.nn.") or name not in ACTIVATIONS:
        raise ModelFilesError(f"{path}: activation_function {activation} is not served; known are torch.nn's {_listed()}")
    return Dense(
        folder=path.parent,
        in_features=_needed(found, "in_features", path),
        out_features=_needed(found, "out_features", path),
        bias=typed(found, "bias", bool, default=True, path=path),
        activation=name,
        use_residual=typed(found, "use_residual", bool, default=False, path=path),
        makes_scores=makes_scores,
    )


def _check_names(found: dict[str, Any], path: Path) -> None:
    """Parts are chained on the pooled vector; one that reads or writes anything else would be silently misapplied."""
    for key in ("module_input_name", "module_output_name"):
        name = typed(found, key, str, "sentence_embedding", path)
        if name != "sentence_embedding":
            raise ModelFilesError(f"{path}: {key} {name} is not served, only sentence_embedding is")


def _needed(found: dict[str, Any], key: str, path: Path) -> int:
    size = typed(found, key, int, 0, path)
    if size < 1:
        raise ModelFilesError(f"{path}: {key} is missing or not positive")
    return int(size)


def _listed() -> str:
    return ", ".join(sorted(ACTIVATIONS))
