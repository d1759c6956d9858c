"""The forms of the fields that hold inputs, told apart and checked before anything is queued.

``str`` and ``list[str]`` are texts; ``list[int]`` is one input, ``list[list[int]]`` several, and their ids are used verbatim.
A body that is too large for one step is read by ``large_body.py``, to the same types and by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import Problem, invalid
from packhorse_frontend.schema import Document

Ids = npt.NDArray[np.int32]
_FORMS = {
    "documents": "a list of texts, or of objects with a text",
    "tokens": "token ids, or a list of token id lists",
}
_WORDS = {str: "text", int: "a token id", list: "a list of token ids"}


@dataclass(frozen=True)
class Texts:
    """Inputs to tokenize. ``listed`` tells whether they came as a list, so that messages can name an index."""

    texts: Sequence[str]
    listed: bool


@dataclass(frozen=True)
class IdLists:
    """Inputs that are token ids already, each within the embedding table; their lengths are not checked yet."""

    ids: Ids
    """The ids of all inputs, joined."""
    lengths: list[int]
    listed: bool


@dataclass(frozen=True)
class TokenizedInputs:
    """What the broker gets: the ids of all inputs joined (int32), and each input's length in tokens."""

    ids: Ids
    """One word for each token; see ``messages.py``."""
    lengths: list[int]
    truncated: int
    """How many inputs were cut."""
    cut: Sequence[int] = ()
    """Of pairs: the indexes of those whose document was cut."""


@dataclass(frozen=True)
class LengthRule:
    """How long an input may be, and what happens to one that is longer."""

    limit: int
    """Most tokens that the server takes, special tokens included."""
    setting: str
    """Name of the setting that is the reason: ``max_seq_len`` or ``max_num_tokens``."""
    truncate_to: int | None
    """Cut inputs to so many tokens before the limit is looked at; None cuts nothing."""

    def refuse(self, naming: Naming, index: int, count: int, *, at_least: bool = False) -> Problem:
        """The 400 for an input that is too long."""
        counted = f"more than {count}" if at_least else f"{count}"
        return invalid(
            f"{naming.label(index)} has {counted} tokens, the limit is {self.limit} (--{self.setting}); "
            "shorten it, or set truncate_prompt_tokens to -1 to have it cut",
            naming.param(index),
            "input_too_long",
        )


def read_input(value: str | Sequence[Any] | None, field: str, max_inputs: int, vocabulary_rows: int) -> Texts | IdLists:
    """Tell the form of a field that holds texts or ids, and check its ids to be within [0, vocabulary_rows).

    Raises Problem (400): absent, empty, mixed, more than ``max_inputs``, or an id that the model does not have.
    """
    if value is None:
        form = _FORMS.get(field, "a text, a list of texts, token ids, or a list of token id lists")
        raise invalid(f"{field} is required: {form}", field)
    if isinstance(value, str):
        return Texts([value], listed=False)
    if not value:
        raise refuse_empty(field, field)
    kinds = set(map(type, value))
    if len(kinds) > 1:
        first = type(value[0])
        index = next(position for position, element in enumerate(value) if type(element) is not first)
        raise refuse_mixture(field, index, type(value[index]), first)
    if kinds == {int}:
        ids = cast("list[int]", value)
        return IdLists(to_array(ids, vocabulary_rows, field, field), [len(ids)], listed=False)
    if len(value) > max_inputs:
        raise refuse_count(field, f"{len(value)}", max_inputs)
    if kinds == {str}:
        return Texts(cast("list[str]", value), listed=True)
    lists = cast("list[list[int]]", value)
    if not all(lists):
        raise refuse_empty(field, f"{field}[{lists.index([])}]")
    joined = _as_array(list(chain.from_iterable(lists)), vocabulary_rows)
    if joined is None:  # some list has an id that is refused; by itself it is refused by name
        joined = np.concatenate(
            [to_array(each, vocabulary_rows, field, f"{field}[{index}]") for index, each in enumerate(lists)]
        )
    return IdLists(joined, list(map(len, lists)), listed=True)


def read_texts(value: str | Sequence[str | Document] | None, field: str, max_inputs: int) -> Texts:
    """A field that holds texts, or documents. Raises Problem (400) where it is absent, empty, or more than ``max_inputs``."""
    if value is None:
        raise invalid(f"{field} is required: {_FORMS.get(field, 'a text, or a list of texts')}", field)
    if isinstance(value, str):
        return Texts([value], listed=False)
    if not value:
        raise refuse_empty(field, field)
    if len(value) > max_inputs:
        raise refuse_count(field, f"{len(value)}", max_inputs)
    return Texts([each if isinstance(each, str) else each.text for each in value], listed=True)


def refuse_empty(field: str, label: str) -> Problem:
    """The 400 for an empty list."""
    return invalid(f"{label} is an empty list; it needs at least one {'input' if label == field else 'token'}", field)


def refuse_count(field: str, count: str, max_inputs: int) -> Problem:
    """The 400 for too many inputs."""
    return invalid(f"{field} has {count} inputs, the limit is {max_inputs} (--max_inputs)", field, "too_many_inputs")


def refuse_mixture(field: str, index: int, kind: type, first: type) -> Problem:
    """The 400 for an input that is of another kind than the first one."""
    return invalid(
        f"{field}[{index}] is {_WORDS[kind]} while {field}[0] is {_WORDS[first]}; all inputs must be of one kind", field
    )


def to_array(ids: Sequence[int], vocabulary_rows: int, field: str, label: str, first: int = 0) -> Ids:
    """Ids as int32, of the list that messages call ``label``. ``first`` is the position of the first one in its input.

    Raises Problem (400) naming an id out of range."""
    array = _as_array(ids, vocabulary_rows)
    if array is not None:
        return array
    position = next(place for place, one in enumerate(ids) if not 0 <= one < vocabulary_rows)
    raise invalid(
        f"{label}[{first + position}] is token id {ids[position]}; this model's ids are 0 to {vocabulary_rows - 1}", field
    )


def _as_array(ids: Sequence[int], vocabulary_rows: int) -> Ids | None:
    """Ids as int32, None if one is out of range."""
    try:
        array = np.fromiter(ids, dtype=np.int32, count=len(ids))
    except OverflowError:
        return None
    return array if array.min() >= 0 and array.max() < vocabulary_rows else None


def cut_ids(inputs: IdLists, rule: LengthRule) -> TokenizedInputs:
    """Ids as they will be encoded: cut where that was asked for. Raises Problem (400) that names an input which is too long."""
    ids, lengths, limit = inputs.ids, inputs.lengths, rule.truncate_to
    if limit is not None and limit < 1:
        raise invalid(f"truncate_prompt_tokens is {limit}, which leaves no token; use at least 1", "truncate_prompt_tokens")
    truncated = 0
    if limit is not None and max(lengths) > limit:
        starts = accumulate(lengths, initial=0)
        ids = np.concatenate([ids[start : start + min(length, limit)] for start, length in zip(starts, lengths, strict=False)])
        truncated = sum(length > limit for length in lengths)
        lengths = [min(length, limit) for length in lengths]
    if max(lengths) > rule.limit:
        index = next(position for position, length in enumerate(lengths) if length > rule.limit)
        raise rule.refuse(Naming.of("input", len(lengths), listed=inputs.listed), index, lengths[index])
    return TokenizedInputs(ids, lengths, truncated)
