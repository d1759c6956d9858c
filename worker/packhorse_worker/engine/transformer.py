"""Loads the transformer of a model folder with transformers, quietly, and refuses what would serve silently wrong vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from packhorse_shared.errors import ModelFilesError, PackhorseError
from packhorse_shared.settings import ModelSettings
from packhorse_worker.engine.files.model_folder import ModelFolder, TokenLimit
from packhorse_worker.engine.files.modules import Head, SequenceHead, TokenHead, YesNoHead
from packhorse_worker.engine.files.weights import find_weights

_TEXT_ENCODERS = frozenset({"mt5", "t5", "umt5"})
"""Encoder-decoder families whose encoder alone transformers can load."""
_ADAPTER_MARK = ".lora_"
_LISTED_TENSORS = 5


def load_transformer(folder: ModelFolder, settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The transformer on its device, in evaluation mode; with its own head where the folder declares one.

    Raises ModelFilesError with one line: no weights, tensors missing from them, an architecture that transformers does not
    know, or the model's own code without ``trust_remote_code``.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    weights = find_weights(folder.transformer, allow_pickle=settings.allow_pickle_weights)
    try:
        model = _load(folder, settings, dtype)
        if folder.config.get("auto_map"):
            _check_values(model, weights)
        return model.eval().requires_grad_(requires_grad=False).to(device)
    except (PackhorseError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        # Whatever a model's files make transformers raise, the files are to blame, and trying again would not help.
        raise ModelFilesError(
            f"{folder.transformer} cannot be loaded: {type(problem).__name__}: {first_line(problem)}"
        ) from problem


def position_limit(model: nn.Module) -> TokenLimit | None:
    """Tokens that the position table holds; without a table, what config.json says; None where neither does.

    In the RoBERTa family positions start behind the padding id, so its 514 rows hold 512 tokens.
    """
    table = _position_table(model)
    if table is not None:
        return TokenLimit(table.num_embeddings - first_position(model), "the position table")
    config: Any = model.config
    tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
    return TokenLimit(tokens, "config.json max_position_embeddings") if isinstance(tokens, int) and tokens > 0 else None


def first_position(model: nn.Module) -> int:
    """Position of an input's first token: behind the padding id where the position table has one, else 0."""
    table = _position_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def _position_table(model: nn.Module) -> nn.Embedding | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] == "position_embeddings":
            return module
    return None


def embedding_shape(model: Any) -> tuple[int, int]:
    """Rows and width of the table of token embeddings. Raises ModelFilesError for a model without one."""
    try:
        rows, width = model.get_input_embeddings().weight.shape
        return int(rows), int(width)
    except (NotImplementedError, AttributeError):
        raise ModelFilesError(f"a {model.config.model_type} has no table of token embeddings, which is not served") from None


def first_line(problem: BaseException) -> str:
    """An exception's text cut to one line of at most 300 characters."""
    text = str(problem).strip()
    return text.splitlines()[0][:300] if text else type(problem).__name__


def _load(folder: ModelFolder, settings: ModelSettings, dtype: torch.dtype) -> nn.Module:
    trusted = settings.trust_remote_code
    if folder.config.get("auto_map") and not trusted and not _is_known(folder.config.get("model_type")):
        raise ModelFilesError(
            f"{folder.transformer / 'config.json'}: the model comes with its own Python code (auto_map); "
            "--trust_remote_code runs it"
        )
    common = {"local_files_only": not trusted, "trust_remote_code": trusted}
    config = AutoConfig.from_pretrained(folder.transformer, **{**folder.config_kwargs, **common})
    config.use_cache = False
    auto_class = _auto_class(folder.head)
    if config.is_encoder_decoder:
        if config.model_type not in _TEXT_ENCODERS or isinstance(folder.head, SequenceHead | YesNoHead):
            raise ModelFilesError(f"{folder.transformer / 'config.json'}: model_type {config.model_type} is an encoder-decoder")
        auto_class = AutoModelForTextEncoding if folder.head is None else auto_class
    # With sizes that do not fit, transformers raises a line that names no tensor; so they come into the report instead.
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    options = {**common, **reported, "config": config, "dtype": dtype}
    options["use_safetensors"] = None if settings.allow_pickle_weights else True
    try:
        model, report = auto_class.from_pretrained(folder.transformer, attn_implementation="sdpa", **options)
    except ValueError as problem:
        if "scaled_dot_product_attention" not in str(problem):
            raise
        model, report = auto_class.from_pretrained(folder.transformer, attn_implementation="eager", **options)
    _check_complete(report, folder)
    return _as_module(model)


def _auto_class(head: Head | None) -> Any:
    """The class of transformers that builds the model with its head."""
    match head:
        case None:
            return AutoModel
        case SequenceHead():
            return AutoModelForSequenceClassification
        case TokenHead():
            return AutoModelForTokenClassification
        case YesNoHead():
            return AutoModelForCausalLM


def _check_complete(report: dict[str, Any], folder: ModelFolder) -> None:
    """Refuse layers that the files leave at random values. Without a head a pooler may be missing: nothing reads it."""
    unread = {"pooler"} if folder.head is None else set()
    missing = sorted(name for name in report["missing_keys"] if unread.isdisjoint(name.split(".")))
    if any(_ADAPTER_MARK in name for name in report["unexpected_keys"]):
        raise ModelFilesError(
            f"the weights in {folder.transformer} hold an adapter that is not merged into them; merge and save"
        )
    sizes = [_mismatch(*each) for each in report["mismatched_keys"]]
    wrong = sorted((*sizes, *map(str, report["error_msgs"])))
    for problem, names in (("lack tensors", missing), ("do not fit config.json", wrong)):
        if names:
            more = f" and {len(names) - _LISTED_TENSORS} more" if len(names) > _LISTED_TENSORS else ""
            listed = ", ".join(names[:_LISTED_TENSORS])
            raise ModelFilesError(
                f"the weights in {folder.transformer} {problem}: {listed}{more}; these layers would be served random"
            )


def _check_values(model: nn.Module, weights: Sequence[Path]) -> None:
    """Refuse a model that does not hold what its files do: transformers 5.0 draws the weights of models with their own code
    anew after it has loaded them. Looks at the first row of every tensor that has the same name in both."""
    loaded = model.state_dict()
    for path in weights:
        if path.suffix != ".safetensors":
            continue
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                here, there = loaded.get(name), file.get_slice(name)
                if here is None or here.ndim == 0 or list(here.shape) != there.get_shape():
                    continue
                if not torch.allclose(here[:1], there[:1].to(here.dtype), equal_nan=True):
                    raise ModelFilesError(
                        f"the loaded model holds other values of {name} than {path}: this version of transformers "
                        f"({transformers.__version__}) does not load the model's own code right, and it would be served random"
                    )


def _mismatch(name: str, found: Any, expected: Any) -> str:
    return f"{name} is {'x'.join(map(str, found))} instead of {'x'.join(map(str, expected))}"


def _is_known(model_type: Any) -> bool:
    try:
        AutoConfig.for_model(model_type)
    except (ValueError, TypeError):
        return False
    return True


def _as_module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module), type(model)  # transformers has no types
    return model
