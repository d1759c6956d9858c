"""How much text is tokenized, and in which steps.

It is bounded three ways. A text of more than ``_LONGEST_TEXT_CHARS`` characters (more for models that take very long inputs) is
refused, or cut there where it may be cut. A long text is first judged by its beginning: when that alone has more than twice
the tokens that are allowed, the rest is left alone. Anything else is tokenized whole, since white space and unknown words can
shrink a long text to a few tokens. And work goes on in steps, so that it can stop when nobody waits for it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import TypeVar

from packhorse_frontend.bodies.inputs import LengthRule
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import invalid

_LONGEST_TEXT_CHARS = 1_000_000
_LONGEST_TEXT_CHARS_PER_TOKEN = 256
_BEGINNING_CHARS = 65_536
_BEGINNING_CHARS_PER_TOKEN = 64
_SLACK_TOKENS = 1024
"""How far cutting a text in two may change the tokens before the cut, with a wide margin."""
_CHARS_PER_STEP = 65_536
"""Text tokenized between two looks at whether the client is still there: some 60 ms."""

Encoded = TypeVar("Encoded", bound=Sized)


class AbandonedError(Exception):
    """Nobody waits for these tokens any more."""


def is_long(text: str, rule: LengthRule) -> bool:
    """Whether a text is to be tokenized by ``encode_long``."""
    return len(text) > _beginning(rule)


def encode_long(
    encode: Callable[[str], Encoded], text: str, rule: LengthRule, naming: Naming, index: int, *, may_cut: bool
) -> tuple[Encoded, bool]:
    """A long text's encoding (its length is its tokens), and whether all of the text is in it.

    Without all of the text it has more than twice the tokens that ``rule`` allows, or the text ``may_cut``. Raises Problem
    (400) naming a text of too many characters that may not.
    """
    longest = max(_LONGEST_TEXT_CHARS, _LONGEST_TEXT_CHARS_PER_TOKEN * rule.limit)
    beginning = encode(text[: _beginning(rule)])
    if len(beginning) > 2 * rule.limit + _SLACK_TOKENS:
        return beginning, False
    if len(text) > longest and not may_cut:
        raise invalid(
            f"{naming.label(index)} has {len(text)} characters; for a limit of {rule.limit} tokens "
            f"(--{rule.setting}) a text may have at most {longest}",
            naming.param(index),
            "input_too_long",
        )
    return encode(text[:longest]), len(text) <= longest


def steps(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of texts, of which ``sizes`` are the characters, with some ``_CHARS_PER_STEP`` each; a longer text is a run of its
    own."""
    start, chars = 0, 0
    for position, size in enumerate(sizes):
        if position > start and chars + size > _CHARS_PER_STEP:
            yield slice(start, position)
            start, chars = position, 0
        chars += size
    yield slice(start, len(sizes))


def _beginning(rule: LengthRule) -> int:
    return _BEGINNING_CHARS + _BEGINNING_CHARS_PER_TOKEN * rule.limit
