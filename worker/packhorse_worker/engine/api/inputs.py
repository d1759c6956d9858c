"""What ``Encoder.encode`` was asked to encode: texts and token ids in the forms that it takes, told apart and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.errors import PackhorseError
from packhorse_shared.values import kind


class PromptDict(TypedDict, total=False):
    """An input with what belongs to it. Exactly one of ``prompt`` and ``prompt_token_ids``."""

    prompt: str
    """A text."""
    prompt_token_ids: TokenIds
    text_pair: str
    """Only beside ``prompt``: the second text, for models that read pairs (the document; ``prompt`` is the query)."""
    prompt_name: str
    """Only beside ``prompt``: which of the model's own prompts goes before the text, instead of the default one."""


TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor"
OneInput: TypeAlias = "str | PromptDict | Mapping[str, Any] | TokenIds"

_KEYS = ("prompt", "prompt_token_ids", "text_pair", "prompt_name")
_FORMS = "a text, a list of token ids, or a dict with prompt or prompt_token_ids"


_THE_INPUT = "the input"


class InputTypeError(PackhorseError, TypeError, ValueError):
    """An input of a type that means nothing here. Also a ValueError: one clause catches whatever is wrong with inputs."""


@dataclass(frozen=True, slots=True)
class Text:
    """An input that is still to be tokenized."""

    text: str
    pair: str | None = None
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """An input that is token ids."""

    ids: list[int]
    prompt_tokens: int = 0
    """Leading tokens that belong to one of the model's own prompts."""
    type_ids: list[int] | None = None
    """Of a pair of texts: which of the two each token belongs to, where the model is told."""


Asked = Text | Tokens


def is_single(inputs: Any) -> bool:
    """Whether ``inputs`` is one input, and not a list or tuple of some. A list that begins with a number is one input."""
    if isinstance(inputs, list | tuple):
        return bool(inputs) and _is_number(inputs[0])
    return True


def read_inputs(inputs: Any, rows: int) -> list[Asked]:
    """The inputs, at least one. ``rows``: token ids must be below it.

    Raises ValueError that names the index of the first input which is wrong; see also InputTypeError.
    """
    if is_single(inputs):
        return [_read_one(inputs, _THE_INPUT, rows)]
    if not inputs:
        raise ValueError(f"inputs is empty; give {_FORMS}, or a list of them")
    return [Text(each) if type(each) is str else _read_one(each, f"inputs[{index}]", rows) for index, each in enumerate(inputs)]


def label_of(index: int, *, single: bool) -> str:
    """How messages name an input."""
    return _THE_INPUT if single else f"inputs[{index}]"


def _read_one(value: Any, label: str, rows: int) -> Asked:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, list | tuple | np.ndarray | torch.Tensor):
        return _read_ids(value, label, "inputs" if label == _THE_INPUT else label, rows)
    if isinstance(value, Mapping):
        return _read_mapping(value, label, rows)
    hint = "; a list or tuple holds several inputs" if hasattr(value, "__iter__") else ""
    raise InputTypeError(f"{label} is {kind(value)}; give {_FORMS}{hint}")


def _read_mapping(found: Mapping[Any, Any], label: str, rows: int) -> Asked:
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        raise ValueError(f"{label} has the key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    given = {key: value for key, value in found.items() if value is not None}
    if ("prompt" in given) == ("prompt_token_ids" in given):
        raise ValueError(f"{label} must have one of prompt and prompt_token_ids, and has {', '.join(given) or 'nothing'}")
    if "prompt_token_ids" in given:
        if len(given) > 1:
            raise ValueError(f"{label} has {', '.join(given)}; token ids are used as they are, so give prompt_token_ids alone")
        if not isinstance(given["prompt_token_ids"], list | tuple | np.ndarray | torch.Tensor):
            raise InputTypeError(f"{label}: prompt_token_ids is {kind(given['prompt_token_ids'])}, not a list of ids")
        return _read_ids(given["prompt_token_ids"], label, f"{label}: prompt_token_ids", rows)
    for key, value in given.items():
        if not isinstance(value, str):
            raise InputTypeError(f"{label}: {key} is {kind(value)}, not a text")
    return Text(given["prompt"], given.get("text_pair"), given.get("prompt_name"))


def _read_ids(ids: Any, label: str, place: str, rows: int) -> Tokens:
    """``place`` is what the ids are the entries of."""
    wide = _from_array(ids, label) if isinstance(ids, np.ndarray | torch.Tensor) else _from_list(ids, place)
    if wide.size == 0:
        raise ValueError(f"{label} has no tokens")
    if wide.min() < 0 or wide.max() >= rows:
        position = int(np.flatnonzero((wide < 0) | (wide >= rows))[0])
        raise ValueError(f"{place}[{position}] is token id {wide[position]}; this model's ids are 0 to {rows - 1}")
    return Tokens(wide.tolist())


def _from_array(ids: NDArray[Any] | torch.Tensor, label: str) -> NDArray[Any]:
    if ids.ndim == 0:
        raise ValueError(
            f"{label} is a single number in an array of no dimensions; give an array of one, or a list of ints (array.tolist())"
        )
    if ids.ndim != 1:
        raise ValueError(
            f"{label} is an array of {ids.ndim} dimensions; token ids have one, and list(array) makes one input of each row"
        )
    if isinstance(ids, torch.Tensor):
        is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)
    else:
        is_whole = ids.dtype.kind in "iu"
    if not is_whole:
        raise InputTypeError(f"{label} is an array of {ids.dtype}; token ids are integers")
    return ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else ids


def _from_list(ids: Sequence[Any], place: str) -> NDArray[Any]:
    if any(kind is not int and not _is_whole(kind) for kind in set(map(type, ids))):
        position = next(index for index, each in enumerate(ids) if not _is_whole(type(each)))
        hint = ""
        if isinstance(ids[position], str):
            hint = '; a pair of texts is {"prompt": ..., "text_pair": ...}'
        elif isinstance(ids[position], np.ndarray | torch.Tensor):
            hint = "; array.tolist() makes a list of them"
        raise InputTypeError(f"{place}[{position}] is {kind(ids[position])}; token ids are integers{hint}")
    try:
        return np.fromiter(ids, dtype=np.int64, count=len(ids))
    except OverflowError:
        return np.array(ids, dtype=object)  # the check against the embedding table names the one that is so large


def _is_whole(kind: type) -> bool:
    return issubclass(kind, int | np.integer) and kind is not bool


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.number | np.bool_)
