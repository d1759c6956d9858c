"""Texts to token ids. Everything here runs in a thread; ``pool.py`` sees to that.

One tokenizer serves all threads and is never changed after it is loaded, and inputs are cut here, so that no request can see
another one's settings.

How much text is tokenized is bounded three ways. A text of more than ``_LONGEST_TEXT_CHARS`` characters (more for models that
take very long inputs) is refused, or cut there where truncation was asked for. A long text is first judged by its beginning:
when that alone has more than twice the tokens that are allowed, the rest is left alone. Anything else is tokenized whole,
since white space and unknown words can shrink a long text to a few tokens. And a request stops at its first input that
is too long, or when its client is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from packhorse_frontend.inputs import LengthRule, TokenizedInputs, label_of
from packhorse_frontend.problems import invalid
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer

_LONGEST_TEXT_CHARS = 1_000_000
_LONGEST_TEXT_CHARS_PER_TOKEN = 256
_BEGINNING_CHARS = 65_536
_BEGINNING_CHARS_PER_TOKEN = 64
_SLACK_TOKENS = 1024
"""How far cutting a text in two may change the tokens before the cut, with a wide margin."""
_CHARS_PER_STEP = 65_536
"""Text tokenized between two looks at whether the client is still there: some 60 ms."""
_SAMPLES = ("a", "the", "1", "0", ".")


class AbandonedError(Exception):
    """Nobody waits for these tokens any more."""


@dataclass(frozen=True)
class TextWork:
    """Texts of one request (or a run of them), and how to tokenize them."""

    texts: Sequence[str]
    first_index: int
    """Index of the first text in its request, for messages."""
    listed: bool
    prompt: str
    lowercase: bool
    add_special_tokens: bool
    rule: LengthRule

    @property
    def chars(self) -> int:
        """Size of the work."""
        return sum(map(len, self.texts)) + len(self.prompt) * len(self.texts)


class TextTokenizer:
    """A model's tokenizer. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = ModelTokenizer(tokenizer)
        self._prefix_tokens, self._suffix_tokens = _count_special_tokens(tokenizer)
        self.count_prompt_tokens = self._tokenizer.count_prompt_tokens

    def tokenize(self, work: TextWork, is_abandoned: Callable[[], bool]) -> TokenizedInputs:
        """Token ids of all texts. Raises Problem (400) naming the first input that is too long or has no tokens."""
        special_tokens = self._prefix_tokens + self._suffix_tokens if work.add_special_tokens else 0
        if work.rule.truncate_to is not None and work.rule.truncate_to < max(1, special_tokens):
            raise invalid(
                f"truncate_prompt_tokens is {work.rule.truncate_to}, but the special tokens alone are {special_tokens}; "
                f"use at least {max(1, special_tokens)}",
                "truncate_prompt_tokens",
            )
        lists: list[list[int]] = []
        truncated = 0
        for index, encoding, is_whole in self._encode(work, is_abandoned):
            ids, is_cut = self._cut(encoding, work)
            label = label_of(index, listed=work.listed)
            if len(ids) > work.rule.limit:
                raise work.rule.refuse(label, len(encoding), at_least=not is_whole)
            if not ids:
                raise invalid(f"{label} has no tokens", "input")
            lists.append(ids)
            truncated += is_cut or not is_whole
        lengths = list(map(len, lists))
        return TokenizedInputs(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=sum(lengths)), lengths, truncated)

    def _encode(self, work: TextWork, is_abandoned: Callable[[], bool]) -> Iterator[tuple[int, Encoding, bool]]:
        """Index, encoding and whether all of the text was tokenized, text by text, a step of text at a time."""
        beginning_chars = _BEGINNING_CHARS + _BEGINNING_CHARS_PER_TOKEN * work.rule.limit
        reader = self._tokenizer.variant(lowercase=work.lowercase)
        index = work.first_index
        for texts in _steps(work.texts):
            if is_abandoned():
                raise AbandonedError
            prepared = [work.prompt + text for text in texts] if work.prompt else texts
            if len(prepared) == 1 and len(prepared[0]) > beginning_chars:
                yield index, *self._encode_long(prepared[0], index, work, beginning_chars)
            else:
                for encoding in reader.encode_batch_fast(prepared, add_special_tokens=work.add_special_tokens):
                    yield index, encoding, True
                    index += 1
                continue
            index += 1

    def _encode_long(self, text: str, index: int, work: TextWork, beginning_chars: int) -> tuple[Encoding, bool]:
        longest_chars = max(_LONGEST_TEXT_CHARS, _LONGEST_TEXT_CHARS_PER_TOKEN * work.rule.limit)
        is_whole = len(text) <= longest_chars
        beginning = self._encode_one(text[:beginning_chars], work)
        if len(beginning) > 2 * work.rule.limit + _SLACK_TOKENS:
            return beginning, False
        if not is_whole and work.rule.truncate_to is None:
            raise invalid(
                f"{label_of(index, listed=work.listed)} has {len(text)} characters; for a limit of {work.rule.limit} tokens "
                f"(--{work.rule.setting}) a text may have at most {longest_chars}",
                "input",
                "input_too_long",
            )
        return self._encode_one(text[:longest_chars], work), is_whole

    def _encode_one(self, text: str, work: TextWork) -> Encoding:
        reader = self._tokenizer.variant(lowercase=work.lowercase)
        encoding: Encoding = reader.encode_batch_fast([text], add_special_tokens=work.add_special_tokens)[0]
        return encoding

    def _cut(self, encoding: Encoding, work: TextWork) -> tuple[list[int], bool]:
        """The ids, cut to ``truncate_to`` tokens with the special tokens kept, and whether something was cut off."""
        limit = work.rule.truncate_to
        if limit is None:
            # The ids of an input that is far too long are not worth a list.
            return (encoding.ids, False) if len(encoding) <= work.rule.limit else ([0] * (work.rule.limit + 1), False)
        ids: list[int] = encoding.ids
        if len(ids) <= limit:
            return ids, False
        suffix = self._suffix_tokens if work.add_special_tokens else 0
        return ids[: limit - suffix] + ids[len(ids) - suffix :], True


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a model folder. Raises ModelFilesError naming the file when it is missing or broken."""
    return TextTokenizer(read_tokenizer(folder))


def _steps(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Runs of texts with some ``_CHARS_PER_STEP`` characters each; a longer text is a run of its own."""
    start, chars = 0, 0
    for position, text in enumerate(texts):
        if position > start and chars + len(text) > _CHARS_PER_STEP:
            yield texts[start:position]
            start, chars = position, 0
        chars += len(text)
    yield texts[start:]


def _count_special_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens the tokenizer puts before and after a text."""
    for sample in _SAMPLES:
        content = tokenizer.encode(sample, add_special_tokens=False).ids
        whole = tokenizer.encode(sample, add_special_tokens=True).ids
        added = len(whole) - len(content)
        if not content:
            continue
        for prefix in range(added + 1):
            if whole[prefix : prefix + len(content)] == content:
                return prefix, added - prefix
    # No sample had tokens of its own: take all that is added for a prefix, as far as the mask does not say otherwise.
    return len(tokenizer.encode("", add_special_tokens=True).ids), 0
