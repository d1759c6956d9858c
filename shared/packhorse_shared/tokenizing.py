"""A model's tokenizer as everything that reads texts uses it, so that a text has the same ids everywhere.

The tokenizer is never changed after it is loaded: padding and truncation are switched off for good, so that it can be used from
several threads at once.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

from tokenizers import Tokenizer, normalizers

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.model_folder import tokenizer_file


class ModelTokenizer:
    """A tokenizer with what sentence-transformers does around it: lower-casing, and counting a prompt's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.count_prompt_tokens = lru_cache(maxsize=64)(self._count_prompt_tokens)

    def variant(self, *, lowercase: bool) -> Tokenizer:
        """The tokenizer, or the one that lower-cases texts first. Not to be changed by anybody."""
        return self._lowering if lowercase else self._tokenizer

    def _count_prompt_tokens(self, prompt: str, *, lowercase: bool, add_special_tokens: bool) -> int:
        """Leading tokens of an input that are its prompt's, counted as sentence-transformers does.

        The prompt is tokenized by itself; a special token at its end (EOS, SEP) is not counted.
        """
        ids = self.variant(lowercase=lowercase).encode(prompt, add_special_tokens=add_special_tokens).ids
        return len(ids) - (bool(ids) and ids[-1] in self._special_ids)

    @cached_property
    def _lowering(self) -> Tokenizer:
        """The tokenizer for ``do_lower_case``, as sentence-transformers makes it: a special token's own text stays as it is."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """What the tokenizer.json of a model folder holds. Raises ModelFilesError naming the file when it is missing or broken."""
    path = tokenizer_file(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises Exception itself
        raise ModelFilesError(f"model: {path} cannot be read as a tokenizer: {problem}") from None
