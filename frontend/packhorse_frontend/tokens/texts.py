"""Texts to token ids. Everything here runs in a thread; ``pool.py`` sees to that.

One tokenizer serves all threads and is never changed after it is loaded, and inputs are cut here, so that no request can see
another one's settings.

How much text is tokenized is bounded, see ``long_texts.py``; and a request stops at its first input that is too long, or when
its client is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from packhorse_frontend.bodies.inputs import Ids, LengthRule, TokenizedInputs
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import invalid
from packhorse_frontend.tokens.long_texts import AbandonedError, encode_long, is_long, steps
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer

_SAMPLES = ("a", "the", "1", "0", ".")
_IDS_PER_ARRAY = 65_536
"""Ids that are lists at a time: an int takes nine times an int32, and millions hold the interpreter while they are read."""


@dataclass(frozen=True)
class TextWork:
    """Texts of one request (or a run of them), and how to tokenize them."""

    texts: Sequence[str]
    first_index: int
    """Index of the first text in its request, for messages."""
    naming: Naming
    prompt: str
    lowercase: bool
    add_special_tokens: bool
    rule: LengthRule
    may_be_empty: bool = False
    """Whether a text without tokens is none the worse for it."""

    @property
    def chars(self) -> int:
        """Size of the work."""
        return sum(map(len, self.texts)) + len(self.prompt) * len(self.texts)


class TextTokenizer:
    """A model's tokenizer. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.model_tokenizer = ModelTokenizer(tokenizer)
        self._prefix_tokens, self._suffix_tokens = _count_special_tokens(tokenizer)
        self.count_prompt_tokens = self.model_tokenizer.count_prompt_tokens

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
        arrays: list[Ids] = []
        lengths: list[int] = []
        truncated = listed = 0
        for index, encoding, is_whole in self._encode(work, is_abandoned):
            ids, is_cut = self._cut(encoding, work)
            if len(ids) > work.rule.limit:
                raise work.rule.refuse(work.naming, index, len(encoding), at_least=not is_whole)
            if not ids and not work.may_be_empty:
                raise invalid(f"{work.naming.label(index)} has no tokens", work.naming.param(index))
            lists.append(ids)
            lengths.append(len(ids))
            listed += len(ids)
            if listed >= _IDS_PER_ARRAY:
                arrays.append(_joined(lists, listed))
                lists, listed = [], 0
            truncated += is_cut or not is_whole
        arrays.append(_joined(lists, listed))
        return TokenizedInputs(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), lengths, truncated)

    def detokenize(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids; an id that the tokenizer does not know gives none."""
        plain = self.model_tokenizer.variant(lowercase=False)
        texts: list[str] = plain.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return texts

    def _encode(self, work: TextWork, is_abandoned: Callable[[], bool]) -> Iterator[tuple[int, Encoding, bool]]:
        """Index, encoding and whether all of the text was tokenized, text by text, a step of text at a time."""
        index = work.first_index
        for step in steps(list(map(len, work.texts))):
            if is_abandoned():
                raise AbandonedError
            texts = work.texts[step]
            prepared = [work.prompt + text for text in texts] if work.prompt else texts
            if len(prepared) == 1 and is_long(prepared[0], work.rule):
                may_cut = work.rule.truncate_to is not None
                found = encode_long(
                    lambda text: self._encode_all([text], work)[0],
                    prepared[0],
                    work.rule,
                    work.naming,
                    index,
                    may_cut=may_cut,
                )
                yield index, *found
                index += 1
                continue
            for encoding in self._encode_all(prepared, work):
                yield index, encoding, True
                index += 1

    def _encode_all(self, texts: Sequence[str], work: TextWork) -> list[Encoding]:
        reader = self.model_tokenizer.variant(lowercase=work.lowercase)
        encodings: list[Encoding] = reader.encode_batch_fast(texts, add_special_tokens=work.add_special_tokens)
        return encodings

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


def _joined(lists: Sequence[Sequence[int]], count: int) -> Ids:
    return np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=count)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a model folder. Raises ModelFilesError naming the file when it is missing or broken."""
    return TextTokenizer(read_tokenizer(folder))


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
