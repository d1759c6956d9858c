"""What a model folder declares: where its transformer is, what it is for, its limits, prompts and Matryoshka sizes.

Reads the files of sentence-transformers (``modules.json`` and its companions); a folder without them is a bare transformer.
Formats: https://sbert.net, ``SentenceTransformer.save``, up to 5.3 and from 5.4 on. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import Task
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.chain import read_chain
from packhorse_worker.engine.files.companion import Companion, PairTemplate, read_companion, read_saved
from packhorse_worker.engine.files.json_file import present, read_object, typed
from packhorse_worker.engine.files.modules import Head, Part
from packhorse_worker.engine.files.tasks import ModelFiles, read_purpose

_NOT_A_LIMIT = 1_000_000
"""Tokenizers without a limit say 1e30 or so."""


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
    task: Task
    parts: tuple[Part, ...]
    """What follows the transformer, in order; the first one is a Pooling. () where ``head`` is set."""
    head: Head | None
    """The transformer's own head; None where ``parts`` make the output."""
    labels: tuple[str, ...]
    """Of the values of an output, in order; () where they have no names."""
    activation: str
    """Name of a class in ``torch.nn``: what turns an output into scores; ``Identity`` where nothing does."""
    pair_template: PairTemplate | None
    """How a pair of texts becomes one by the chat template; None where the tokenizer joins them by itself."""
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
    chain = read_chain(modules) if modules.is_file() else None
    transformer = path if chain is None else chain.transformer
    for adapter in present(transformer, "adapter_config.json"):
        raise ModelFilesError(
            f"{adapter}: the model is a PEFT adapter; merge it into its base model (merge_and_unload) and save"
        )
    config_path = transformer / "config.json"
    config = read_object(config_path)
    companion, saved = read_companion(transformer), read_saved(path)
    purpose = read_purpose(ModelFiles(config_path, config, chain, companion, saved), settings)
    dimensions, any_dimension = _read_matryoshka(config, config_path) if purpose.task == "embedding" else ((), False)
    declared = (config_path, *(() if chain is None else chain.files))
    return ModelFolder(
        path=path,
        transformer=transformer,
        config=config,
        task=purpose.task,
        parts=purpose.parts,
        head=purpose.head,
        labels=purpose.labels,
        activation=purpose.activation,
        pair_template=companion.pair_template if chain is not None else _undeclared_template(transformer),
        limit=_read_limit(companion, transformer),
        lowercase=typed(companion.found, "do_lower_case", bool, default=False, path=transformer) and not _lowers(transformer),
        prompts=saved.prompts,
        default_prompt_name=saved.default_prompt_name,
        matryoshka_dimensions=dimensions,
        matryoshka_any=any_dimension,
        config_kwargs=companion.nested("config_kwargs", "config_args"),
        tokenizer_kwargs=companion.nested("processor_kwargs", "tokenizer_args"),
        files=(*declared, *(each for each in (saved.path, companion.path) if each is not None)),
    )


def _undeclared_template(transformer: Path) -> PairTemplate | None:
    """Without modules.json sentence-transformers uses a chat template where there is one."""
    for path in present(transformer, "chat_template.jinja"):
        return PairTemplate() if path.stat().st_size else None
    for path in present(transformer, "tokenizer_config.json"):
        return PairTemplate() if read_object(path).get("chat_template") else None
    return None


def _read_limit(companion: Companion, transformer: Path) -> TokenLimit | None:
    """As sentence-transformers ranks them: processor_kwargs, max_seq_length, then the tokenizer's own."""
    path = companion.path
    if path is not None:
        named = companion.nested("processor_kwargs", "tokenizer_args").get("model_max_length")
        tokens = named if named is not None else typed(companion.found, "max_seq_length", int, None, path)
        if isinstance(tokens, int) and 0 < tokens < _NOT_A_LIMIT:
            return TokenLimit(tokens, f"{path.name} max_seq_length")
    for path in present(transformer, "tokenizer_config.json"):
        tokens = read_object(path).get("model_max_length")
        if isinstance(tokens, int | float) and 0 < tokens < _NOT_A_LIMIT:
            return TokenLimit(int(tokens), f"{path.name} model_max_length")
    return None


def _lowers(transformer: Path) -> bool:
    """Whether the tokenizer lower-cases by itself: then nothing is left to do for ``do_lower_case``."""
    for path in present(transformer, "tokenizer.json"):
        normalizer = typed(read_object(path), "normalizer", dict, {}, path)
        steps = [normalizer, *typed(normalizer, "normalizers", list, [], path)]
        return any(step.get("type") == "Lowercase" or step.get("lowercase") is True for step in steps)
    return False


def _read_matryoshka(config: dict[str, Any], path: Path) -> tuple[tuple[int, ...], bool]:
    dimensions = typed(config, "matryoshka_dimensions", list, [], path)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in dimensions):
        raise ModelFilesError(f"{path}: matryoshka_dimensions {dimensions!r} are not positive integers")
    return tuple(dimensions), typed(config, "is_matryoshka", bool, default=False, path=path) and not dimensions
