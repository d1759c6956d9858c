"""What callers of the Python API hand over, of whatever type: whether it is a whole number, and how messages quote it."""

from __future__ import annotations

import builtins
import operator
import reprlib
from typing import Any

LONGEST_NAME = 200
"""Characters of a name or path that a message shows."""


def whole_number(value: Any) -> int | None:
    """The int that a value stands for: an int, or a single whole number of numpy's or torch's. None for all else.

    True and False are none, whoever made them: torch takes its own for 1 and 0.
    """
    dimensions: Any = getattr(value, "ndim", 0)
    if isinstance(value, bool) or dimensions or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for tensors that hold no values
        return None


def quoted(value: Any) -> str:
    """The value in one line, cut to a few characters; Python refuses to write very long numbers at all."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else kind(value)


def kind(value: Any) -> str:
    """What a value is, behind "is": ``an int``, ``a Tensor``, ``None``. numpy's bool is told from Python's."""
    if value is None:
        return "None"
    name = type(value).__name__
    module = type(value).__module__
    if module != "builtins" and hasattr(builtins, name):
        name = f"{module}.{name}"
    return f"{'an' if name[0].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def shortened(text: str) -> str:
    """A name or path as messages show it: what is between a long one's beginning and its end is left out."""
    half = LONGEST_NAME // 2
    return text if len(text) <= LONGEST_NAME else f"{text[:half]}...{text[-half:]}"
