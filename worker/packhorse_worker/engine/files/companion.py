"""The files that sentence-transformers puts beside a model's own: ``config_sentence_transformers.json`` for the whole model,
``sentence_bert_config.json`` for its transformer.

Formats: https://sbert.net, ``save_pretrained`` of SentenceTransformer and CrossEncoder, up to 5.3 and from 5.4 on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.files.json_file import present, read_object, typed

_NAMES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_HARMLESS = frozenset(
    {"add_pooling_layer", "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage"}
    | {"logits_to_keep", "pad_to_multiple_of", "padding", "padding_side", "return_tensors", "revision", "token", "torch_dtype"}
    | {"truncation", "unpad_inputs", "use_memory_efficient_attention", "use_safetensors"}
)
"""Options that choose how a model is loaded or padded, and leave its vectors alone."""
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
"""For each ``transformer_task`` that is served: the output of the transformer, and the name it gets."""
ChatFormat = Literal["auto", "flat", "structured"]


@dataclass(frozen=True)
class PairTemplate:
    """A pair of texts becomes one by the tokenizer's chat template, as messages of the roles ``query`` and ``document``."""

    format: ChatFormat = "auto"
    """What a message's content is: the text itself, or a list of typed parts. ``auto``: whichever the template renders."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of ``apply_chat_template``, as ``{"add_generation_prompt": True}``."""


@dataclass(frozen=True)
class Companion:
    """What sentence_bert_config.json (or one of its older names) says; all defaults without one."""

    path: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    transformer_task: str = "feature-extraction"
    pair_template: PairTemplate | None = None
    """Set where texts go through the chat template."""

    def nested(self, *keys: str) -> dict[str, Any]:
        """The first of these sections that is there, without what a file must never switch on."""
        return _nested(self.found, *keys)


@dataclass(frozen=True)
class Saved:
    """What config_sentence_transformers.json says; all defaults without one."""

    path: Path | None = None
    kind: Literal["SentenceTransformer", "CrossEncoder"] = "SentenceTransformer"
    activation: str | None = None
    """Dotted path of a class."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


def read_companion(transformer: Path) -> Companion:
    """What the transformer's companion file says. Raises ModelFilesError naming it when it asks for what is not served."""
    for path in present(transformer, *_NAMES)[:1]:
        found = read_object(path)
        task = typed(found, "transformer_task", str, "feature-extraction", path)
        if task not in _OUTPUTS:
            raise ModelFilesError(f"{path}: transformer_task {task} is not served, only {', '.join(_OUTPUTS)} are")
        pair_template = _read_modalities(found, task, path)
        _check_extras(found, path)
        return Companion(path, found, task, pair_template)
    return Companion()


def read_saved(folder: Path) -> Saved:
    """What the model's own file says. Raises ModelFilesError naming it when the model is of another kind than is served."""
    for path in present(folder, "config_sentence_transformers.json"):
        found = read_object(path)
        kind = typed(found, "model_type", str, "SentenceTransformer", path)
        if kind not in ("SentenceTransformer", "CrossEncoder"):
            raise ModelFilesError(f"{path}: the model is a {kind}, which is not served")
        declared = typed(found, "prompts", dict, {}, path)
        prompts = {name: "" if text is None else text for name, text in declared.items()}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise ModelFilesError(f"{path}: prompts must map names to texts")
        default = typed(found, "default_prompt_name", str, None, path)
        if default is not None and default not in prompts:
            raise ModelFilesError(f"{path}: default_prompt_name {default} is not among its prompts ({', '.join(prompts)})")
        return Saved(path, kind, typed(found, "activation_fn", str, None, path), prompts, default)
    return Saved()


def _read_modalities(found: dict[str, Any], task: str, path: Path) -> PairTemplate | None:
    """Check that texts go in and the expected output comes out. Files from before 5.4 know nothing but text."""
    output, name = _OUTPUTS[task]
    modalities = typed(found, "modality_config", dict, {"text": {}}, path)
    message = typed(modalities, "message", dict, None, path)
    if message is not None and task == "feature-extraction":
        raise ModelFilesError(
            f"{path}: modality_config has a message entry (texts go through a chat template), which is not served"
        )
    for entry in (modalities.get("text"),) if message is None else (message,):
        if not isinstance(entry, dict) or entry.get("method_output_name", output) != output:
            raise ModelFilesError(f"{path}: modality_config has no text that gives {output}; only that is served")
    named = typed(found, "module_output_name", str, name, path)
    if named != name:
        raise ModelFilesError(f"{path}: module_output_name {named} is not served, only {name} is")
    if message is None:
        return None
    chat_format = typed(message, "format", str, "auto", path)
    if chat_format not in ("auto", "flat", "structured"):
        raise ModelFilesError(f"{path}: the format of a message is {chat_format}, expected flat or structured")
    return PairTemplate(chat_format, _read_arguments(found, path))


def _read_arguments(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Arguments of the chat template; how it is padded, and that a cut text keeps its end, needs no saying here."""
    section = typed(typed(found, "processing_kwargs", dict, {}, path), "chat_template", dict, {}, path)
    if "max_length" in section:
        raise ModelFilesError(f"{path}: processing_kwargs sets max_length, which is not served")
    return {name: value for name, value in section.items() if name not in {*_HARMLESS, "restore_suffix"}}


def _check_extras(found: dict[str, Any], path: Path) -> None:
    """Refuse options that would change the vectors and are not followed here."""
    processing = typed(found, "processing_kwargs", dict, {}, path)
    has_messages = "message" in typed(found, "modality_config", dict, {}, path)
    parts = ("common", "text") if has_messages else ("common", "text", "chat_template")
    calls = [key for part in parts for key in typed(processing, part, dict, {}, path)]
    for section, keys in (("processing_kwargs", calls), ("model_kwargs", _nested(found, "model_kwargs", "model_args"))):
        for key in keys:
            if key not in _HARMLESS:
                raise ModelFilesError(f"{path}: {section} sets {key}, which is not served")
    for key in ("query_expansion", "tokenizer_name_or_path"):
        if found.get(key):
            raise ModelFilesError(f"{path}: {key} is set, which is not served")


def _nested(found: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        if isinstance(found.get(key), dict):
            return {name: value for name, value in found[key].items() if name != "trust_remote_code"}
    return {}
