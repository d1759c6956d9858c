"""What a model folder declares: where its transformer is, what follows it, its limits, prompts and Matryoshka sizes.

Reads the files of sentence-transformers (``modules.json`` and its companions); a folder without them is a bare transformer.
Formats: https://sbert.net, ``SentenceTransformer.save``, up to 5.3 and from 5.4 on. Nothing here needs torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.json_file import read_json, read_object, typed
from packhorse_worker.engine.modules import Normalize, Part, Pooling, read_part

log = logging.getLogger(__name__)

_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_NOT_A_LIMIT = 1_000_000
"""Tokenizers without a limit say 1e30 or so."""
_DECODERS = frozenset(
    {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Values of ``model_type`` that are decoders whatever class a checkpoint was saved from."""
_HARMLESS = frozenset(
    {"add_pooling_layer", "attn_implementation", "cache_dir", "device_map", "dtype", "local_files_only", "low_cpu_mem_usage"}
    | {"pad_to_multiple_of", "padding", "return_tensors", "revision", "token", "torch_dtype", "truncation", "unpad_inputs"}
    | {"use_memory_efficient_attention", "use_safetensors"}
)
"""Options of sentence_bert_config.json that choose how a model is loaded or padded, and leave its vectors alone."""
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "RewardModel")


@dataclass(frozen=True)
class TokenLimit:
    """A limit on the tokens of one input, and the place that sets it."""

    tokens: int
    source: str


@dataclass(frozen=True)
class ModelFolder:
    """What the files say, checked; the weights are not looked at."""

    path: Path
    transformer: Path
    """Folder of the transformer's config.json and weights: ``path`` or one below it."""
    config: dict[str, Any]
    """The transformer's config.json."""
    parts: tuple[Part, ...]
    """What follows the transformer, in order; the first one is a Pooling."""
    limit: TokenLimit | None
    """The sentence-transformers or tokenizer limit; the position table may be tighter."""
    lowercase: bool
    prompts: dict[str, str]
    default_prompt_name: str | None
    matryoshka_dimensions: tuple[int, ...]
    matryoshka_any: bool
    config_kwargs: dict[str, Any]
    """Values that the model's files put over its config.json."""
    tokenizer_kwargs: dict[str, Any]
    """Values that the model's files put over its tokenizer_config.json."""
    files: tuple[Path, ...]
    """Every configuration file that was read."""


def read_model_folder(path: Path, settings: ModelSettings) -> ModelFolder:
    """Read a model folder and put the settings ``pooling`` and ``normalize`` over it.

    Raises ModelFilesError with one line that names the file which is missing, broken or says what cannot be served.
    """
    modules = path / "modules.json"
    if modules.is_file():
        transformer, parts, files = _read_modules(modules)
    else:
        transformer, parts, files = path, (), ()
    for adapter in _present(transformer, "adapter_config.json"):
        raise ModelFilesError(
            f"{adapter}: the model is a PEFT adapter; merge it into its base model (merge_and_unload) and save"
        )
    config_path = transformer / "config.json"
    config = read_object(config_path)
    if not modules.is_file():
        parts = _bare_parts(config, config_path, settings)
    companion = _read_companion(transformer)
    prompts, default_prompt_name = _read_prompts(path)
    dimensions, any_dimension = _read_matryoshka(config, config_path)
    return ModelFolder(
        path=path,
        transformer=transformer,
        config=config,
        parts=_override(parts, modules, settings),
        limit=_read_limit(companion, transformer),
        lowercase=typed(companion, "do_lower_case", bool, default=False, path=transformer) and not _lowers(transformer),
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        matryoshka_dimensions=dimensions,
        matryoshka_any=any_dimension,
        config_kwargs=_nested(companion, "config_kwargs", "config_args"),
        tokenizer_kwargs=_nested(companion, "processor_kwargs", "tokenizer_args"),
        files=(config_path, *files, *_present(path, "config_sentence_transformers.json"), *_companions(transformer)),
    )


def is_decoder(config: dict[str, Any]) -> bool:
    """Whether the transformer reads left to right, so that only its last token has seen the whole input."""
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return False
    return config.get("model_type") in _DECODERS or any(name.endswith("ForCausalLM") for name in _architectures(config))


def _read_modules(path: Path) -> tuple[Path, tuple[Part, ...], tuple[Path, ...]]:
    """The transformer's folder, the parts behind it, and the files read."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ModelFilesError(f"{path} is not a list of modules")
    transformer: Path | None = None
    parts: list[Part] = []
    files = [path]
    for number, entry in enumerate(entries):
        kind, folder = _read_entry(entry, path)
        if number == 0 and kind == "Transformer":
            transformer = folder
            continue
        try:
            part = read_part(kind, folder)
        except KeyError:
            raise ModelFilesError(f"{path}: module {number} is a {entry['type']}, which is not served") from None
        files += _present(folder, "config.json")
        if part is not None:
            parts.append(part)
    if transformer is None:
        raise ModelFilesError(f"{path}: the first module is a {entries[0]['type']}; only a Transformer is served there")
    return transformer, tuple(parts), tuple(files)


def _read_entry(entry: Any, path: Path) -> tuple[str, Path]:
    """Class name and folder of one entry of modules.json."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or not isinstance(entry.get("path"), str):
        raise ModelFilesError(f"{path}: an entry without type and path: {str(entry)[:80]}")
    kind: str = entry["type"]
    if not kind.startswith("sentence_transformers."):
        raise ModelFilesError(f"{path}: module type {kind} is the model's own code, which is not served")
    folder = (path.parent / entry["path"]).absolute()
    if ".." in Path(entry["path"]).parts or not folder.is_relative_to(path.parent.absolute()):
        raise ModelFilesError(f"{path}: path {entry['path']} leads out of the model folder")
    return kind.rpartition(".")[2], folder


def _bare_parts(config: dict[str, Any], path: Path, settings: ModelSettings) -> tuple[Part, ...]:
    """What a transformer without sentence-transformers files is served as, told in one warning."""
    architectures = _architectures(config)
    if any(name.endswith(_CLASSIFIERS) for name in architectures):
        raise ModelFilesError(
            f"{path}: the model is a classifier (architectures: {', '.join(architectures)}); "
            "this release serves text embeddings"
        )
    decoder = is_decoder(config)
    if settings.pooling is None:
        log.warning(
            "the model has no modules.json: its vectors are made by %s pooling%s; --pooling and --normalize say otherwise",
            "last token" if decoder else "mean",
            " and normalization" if decoder else "",
            extra={"folder": str(path.parent)},
        )
    return (Pooling(("lasttoken",)), Normalize()) if decoder else (Pooling(("mean",)),)


def _override(parts: tuple[Part, ...], modules: Path, settings: ModelSettings) -> tuple[Part, ...]:
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
    poolings = [number for number, part in enumerate(parts) if isinstance(part, Pooling)]
    if poolings != [0]:
        wrong = "no Pooling module" if not poolings else "a Pooling module that does not stand right behind the Transformer"
        raise ModelFilesError(f"{modules} has {wrong}; --pooling can add the missing one")
    return parts


def _read_companion(transformer: Path) -> dict[str, Any]:
    """sentence_bert_config.json or the like; {} without one."""
    paths = _companions(transformer)
    if not paths:
        return {}
    companion = read_object(paths[0])
    task = typed(companion, "transformer_task", str, "feature-extraction", paths[0])
    if task != "feature-extraction":
        raise ModelFilesError(f"{paths[0]}: transformer_task {task} is not served; this release serves text embeddings")
    modalities = typed(companion, "modality_config", dict, {"text": {}}, paths[0])
    text = modalities.get("text")
    if not isinstance(text, dict) or text.get("method_output_name", "last_hidden_state") != "last_hidden_state":
        raise ModelFilesError(f"{paths[0]}: modality_config has no text that gives last_hidden_state; only that is served")
    if "message" in modalities:
        raise ModelFilesError(
            f"{paths[0]}: modality_config has a message entry (texts go through a chat template), which is not served"
        )
    output = typed(companion, "module_output_name", str, "token_embeddings", paths[0])
    if output != "token_embeddings":
        raise ModelFilesError(f"{paths[0]}: module_output_name {output} is not served, only token_embeddings is")
    _check_extras(companion, paths[0])
    return companion


def _check_extras(companion: dict[str, Any], path: Path) -> None:
    """Refuse options that would change the vectors and are not followed here."""
    processing = typed(companion, "processing_kwargs", dict, {}, path)
    calls = [key for part in ("common", "text", "chat_template") for key in typed(processing, part, dict, {}, path)]
    loads = _nested(companion, "model_kwargs", "model_args")
    for section, keys in (("processing_kwargs", calls), ("model_kwargs", loads)):
        for key in keys:
            if key not in _HARMLESS:
                raise ModelFilesError(f"{path}: {section} sets {key}, which is not served")
    for key in ("query_expansion", "tokenizer_name_or_path"):
        if companion.get(key):
            raise ModelFilesError(f"{path}: {key} is set, which is not served")


def _companions(transformer: Path) -> tuple[Path, ...]:
    return _present(transformer, *_TRANSFORMER_CONFIGS)[:1]


def _read_limit(companion: dict[str, Any], transformer: Path) -> TokenLimit | None:
    """As sentence-transformers ranks them: processor_kwargs, max_seq_length, then the tokenizer's own."""
    for path in _companions(transformer):
        named = _nested(companion, "processor_kwargs", "tokenizer_args").get("model_max_length")
        tokens = named if named is not None else typed(companion, "max_seq_length", int, None, path)
        if isinstance(tokens, int) and 0 < tokens < _NOT_A_LIMIT:
            return TokenLimit(tokens, f"{path.name} max_seq_length")
    for path in _present(transformer, "tokenizer_config.json"):
        tokens = read_object(path).get("model_max_length")
        if isinstance(tokens, int | float) and 0 < tokens < _NOT_A_LIMIT:
            return TokenLimit(int(tokens), f"{path.name} model_max_length")
    return None


def _lowers(transformer: Path) -> bool:
    """Whether the tokenizer lower-cases by itself: then nothing is left to do for ``do_lower_case``."""
    for path in _present(transformer, "tokenizer.json"):
        normalizer = typed(read_object(path), "normalizer", dict, {}, path)
        steps = [normalizer, *typed(normalizer, "normalizers", list, [], path)]
        return any(step.get("type") == "Lowercase" or step.get("lowercase") is True for step in steps)
    return False


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the one that applies when nothing is asked."""
    for config_path in _present(path, "config_sentence_transformers.json"):
        found = read_object(config_path)
        kind = typed(found, "model_type", str, "SentenceTransformer", config_path)
        if kind != "SentenceTransformer":
            raise ModelFilesError(f"{config_path}: the model is a {kind}; this release serves text embeddings")
        declared = typed(found, "prompts", dict, {}, config_path)
        prompts = {name: "" if text is None else text for name, text in declared.items()}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise ModelFilesError(f"{config_path}: prompts must map names to texts")
        default = typed(found, "default_prompt_name", str, None, config_path)
        if default is not None and default not in prompts:
            raise ModelFilesError(
                f"{config_path}: default_prompt_name {default} is not among its prompts ({', '.join(prompts)})"
            )
        return prompts, default
    return {}, None


def _read_matryoshka(config: dict[str, Any], path: Path) -> tuple[tuple[int, ...], bool]:
    dimensions = typed(config, "matryoshka_dimensions", list, [], path)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in dimensions):
        raise ModelFilesError(f"{path}: matryoshka_dimensions {dimensions!r} are not positive integers")
    return tuple(dimensions), typed(config, "is_matryoshka", bool, default=False, path=path) and not dimensions


def _nested(companion: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The first of these sections that is there, without what a file must never switch on."""
    for key in keys:
        if isinstance(companion.get(key), dict):
            return {name: value for name, value in companion[key].items() if name != "trust_remote_code"}
    return {}


def _architectures(config: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(name) for name in config.get("architectures") or ())


def _present(folder: Path, *names: str) -> tuple[Path, ...]:
    return tuple(folder / name for name in names if (folder / name).is_file())
