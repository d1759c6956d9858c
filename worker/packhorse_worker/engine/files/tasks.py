"""What a model is for, and what makes its output: parts behind the transformer, or a head of the transformer's own.

Decided by the model's own files: modules.json and its companions where sentence-transformers saved it, else the class that
config.json names under ``architectures``. Nothing here needs torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError, SettingsError
from packhorse_shared.messages import Task
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.activation import is_declared, read_activation
from packhorse_worker.engine.files.chain import Chain
from packhorse_worker.engine.files.companion import Companion, Saved
from packhorse_worker.engine.files.json_file import typed
from packhorse_worker.engine.files.labels import numbered, read_labels
from packhorse_worker.engine.files.modules import (
    Dense,
    Head,
    LogitScore,
    Normalize,
    Part,
    Pooling,
    SequenceHead,
    TokenHead,
    YesNoHead,
)
from packhorse_worker.engine.files.vocabulary import token_ids

log = logging.getLogger(__name__)

_DECODERS = frozenset(
    {"bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "gpt2", "gpt_neo", "gpt_neox", "gptj"}
    | {
        "granite",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
    }
    | {"qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Values of ``model_type`` that are decoders whatever class a checkpoint was saved from."""


@dataclass(frozen=True)
class ModelFiles:
    """The files that decide, read and checked one by one."""

    config_path: Path
    config: dict[str, Any]
    """The transformer's config.json."""
    chain: Chain | None
    """modules.json; None without one."""
    companion: Companion
    saved: Saved


@dataclass(frozen=True)
class Purpose:
    """What a model is for, and what makes its output."""

    task: Task
    parts: tuple[Part, ...] = ()
    """What follows the transformer; () where it has a head of its own."""
    head: Head | None = None
    labels: tuple[str, ...] = ()
    """Of the values of an output, in order; () where they have no names."""
    activation: str = "Identity"
    """Name of a class in ``torch.nn``: what turns an output into scores."""


def read_purpose(files: ModelFiles, settings: ModelSettings) -> Purpose:
    """What the files declare, with the settings ``pooling`` and ``normalize`` put over it.

    Raises ModelFilesError naming the file that says what cannot be served, and SettingsError for a setting that the model's
    task has no use for.
    """
    purpose = _bare(files, settings) if files.chain is None else _chained(files, files.chain, settings)
    if purpose.task == "embedding":
        return replace(purpose, parts=_override(purpose.parts, files, settings))
    for name in ("pooling", "normalize", "matryoshka_dimensions"):
        if getattr(settings, name) not in (None, ()):
            raise SettingsError(name, f"is for text embeddings; the model's task is {purpose.task} ({files.config_path})")
    return purpose


def is_decoder(config: dict[str, Any]) -> bool:
    """Whether the transformer reads left to right, so that only its last token has seen the whole input."""
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return False
    return config.get("model_type") in _DECODERS or any(name.endswith("ForCausalLM") for name in architectures(config))


def architectures(config: dict[str, Any]) -> tuple[str, ...]:
    """Names of the classes that the checkpoint was saved from."""
    return tuple(str(name) for name in config.get("architectures") or ())


def _chained(files: ModelFiles, chain: Chain, settings: ModelSettings) -> Purpose:
    """By modules.json: what stands behind the transformer must be what its task feeds."""
    task, parts = files.companion.transformer_task, tuple(part for part in chain.parts if not isinstance(part, LogitScore))
    scores = tuple(part for part in chain.parts if isinstance(part, LogitScore))
    is_cross_encoder = files.saved.kind == "CrossEncoder"
    if task == "sequence-classification" and is_cross_encoder and not chain.parts:
        return _sequence(files, settings)
    if task == "text-generation" and is_cross_encoder and len(scores) == 1 and not parts:
        return _yes_no(files, scores[0].true_token_id, scores[0].false_token_id, scores[0].folder / "config.json", settings)
    if task != "feature-extraction" or scores:
        kinds = ", ".join(type(part).__name__ for part in chain.parts) or "nothing"
        raise ModelFilesError(
            f"{chain.path}: a {files.saved.kind} of a transformer for {task} with {kinds} behind it is not served"
        )
    dense = [number for number, part in enumerate(parts) if isinstance(part, Dense) and part.makes_scores]
    if is_cross_encoder != bool(dense) or dense not in ([], [len(parts) - 1]):
        raise ModelFilesError(f"{chain.path}: a {files.saved.kind} ends in scores exactly when it is a CrossEncoder")
    return _pooled_scores(files, chain, parts, settings) if dense else Purpose("embedding", parts)


def _pooled_scores(files: ModelFiles, chain: Chain, parts: tuple[Part, ...], settings: ModelSettings) -> Purpose:
    """A cross-encoder whose head is listed in modules.json: a pooling, and layers of which the last one gives the scores."""
    last = parts[-1]
    assert isinstance(last, Dense), parts
    _check_pooling(parts, chain.path)
    labels = numbered(last.out_features, last.folder / "config.json")
    activation = _activation(files, len(labels), settings)
    return Purpose("rerank" if len(labels) == 1 else "classify", parts, None, labels, activation)


def _bare(files: ModelFiles, settings: ModelSettings) -> Purpose:
    """By the class that config.json names."""
    names = architectures(files.config)
    if any(name.endswith("RewardModel") for name in names):
        raise ModelFilesError(
            f"{files.config_path}: {', '.join(names)} is a reward model of its own code, which is not served; "
            "those of transformers end in ForSequenceClassification or ForTokenClassification"
        )
    if any(name.endswith("ForTokenClassification") for name in names):
        labels = _labels(files)
        return Purpose("token_reward", (), TokenHead(labels), labels)
    if any(name.endswith("ForSequenceClassification") for name in names) or (
        files.saved.kind == "CrossEncoder" and not any(name.endswith("ForCausalLM") for name in names)
    ):
        return _sequence(files, settings)
    if any(name.endswith("ForCausalLM") for name in names):
        words = typed(files.config, "classifier_from_token", list, None, files.config_path)
        if words is None and files.saved.kind == "CrossEncoder":
            words = ["no", "yes"]  # as sentence-transformers takes them
        if words is not None:
            return _yes_no_by_words(files, words, settings)
    return Purpose("embedding", _bare_parts(files, settings))


def _sequence(files: ModelFiles, settings: ModelSettings) -> Purpose:
    labels = _labels(files)
    is_cross_encoder = files.saved.kind == "CrossEncoder" or is_declared(files.config, files.config_path)
    activation = "Identity"
    if is_cross_encoder or not is_decoder(files.config):
        activation = _activation(files, len(labels), settings)
    task: Task = "classify"
    if len(labels) == 1:
        task = "reward" if is_decoder(files.config) and not is_cross_encoder else "rerank"
    return Purpose(task, (), SequenceHead(labels, activation), labels, activation)


def _yes_no_by_words(files: ModelFiles, words: list[Any], settings: ModelSettings) -> Purpose:
    """``["no", "yes"]``, or the one word whose logit is the score."""
    if len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
        raise ModelFilesError(
            f'{files.config_path}: classifier_from_token is {words!r}, expected the words for no and yes, as ["no", "yes"]'
        )
    ids = token_ids(files.config_path.parent, words, files.config_path)
    return _yes_no(files, ids[-1], ids[0] if len(ids) == 2 else None, files.config_path, settings)


def _yes_no(files: ModelFiles, true_id: int, false_id: int | None, path: Path, settings: ModelSettings) -> Purpose:
    rows = files.config.get("vocab_size")
    if isinstance(rows, int) and max(true_id, false_id or 0) >= rows:
        raise ModelFilesError(f"{path}: token {max(true_id, false_id or 0)} is none of the model's {rows}")
    activation = _activation(files, 1, settings)
    return Purpose("rerank", (), YesNoHead(true_id, false_id, activation), (), activation)


def _labels(files: ModelFiles) -> tuple[str, ...]:
    return read_labels(files.config, files.companion.nested("config_kwargs", "config_args"), files.config_path)


def _activation(files: ModelFiles, scores: int, settings: ModelSettings) -> str:
    return read_activation(files.saved, files.config, files.config_path, scores, trusted=settings.trust_remote_code)


def _bare_parts(files: ModelFiles, settings: ModelSettings) -> tuple[Part, ...]:
    """What a transformer without sentence-transformers files is served as, told in one warning."""
    decoder = is_decoder(files.config)
    if settings.pooling is None:
        log.warning(
            "the model has no modules.json: its vectors are made by %s pooling%s; --pooling and --normalize say otherwise",
            "last token" if decoder else "mean",
            " and normalization" if decoder else "",
            extra={"folder": str(files.config_path.parent)},
        )
    return (Pooling(("lasttoken",)), Normalize()) if decoder else (Pooling(("mean",)),)


def _override(parts: tuple[Part, ...], files: ModelFiles, settings: ModelSettings) -> tuple[Part, ...]:
    """The parts with ``pooling`` and ``normalize`` put over them, checked to be a chain."""
    if settings.pooling is not None:
        if not any(isinstance(part, Pooling) for part in parts):
            parts = (Pooling((settings.pooling,)), *parts)
        parts = tuple(replace(part, modes=(settings.pooling,)) if isinstance(part, Pooling) else part for part in parts)
    if settings.normalize is not None:
        kept = tuple(part for part in parts if not isinstance(part, Normalize))
        if not settings.normalize:
            parts = kept
        elif not parts or not isinstance(parts[-1], Normalize):
            parts = (*parts, Normalize())
    _check_pooling(parts, files.config_path.parent / "modules.json" if files.chain is None else files.chain.path)
    return parts


def _check_pooling(parts: tuple[Part, ...], modules: Path) -> None:
    poolings = [number for number, part in enumerate(parts) if isinstance(part, Pooling)]
    if poolings != [0]:
        wrong = "no Pooling module" if not poolings else "a Pooling module that does not stand right behind the Transformer"
        raise ModelFilesError(f"{modules} has {wrong}; --pooling can add the missing one")
