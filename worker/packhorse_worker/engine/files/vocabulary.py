"""Words of a model's vocabulary, looked up in its tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.model_folder import tokenizer_file
from packhorse_shared.tokenizing import read_tokenizer


def token_ids(folder: Path, words: list[str], named_by: Path) -> list[int]:
    """The ids of words that are one token each. Raises ModelFilesError naming the file that has a word without a token."""
    tokenizer = read_tokenizer(folder)
    ids = []
    for word in words:
        found = tokenizer.token_to_id(word)
        if found is None:
            raise ModelFilesError(f"{named_by} names the token {word!r}, which {tokenizer_file(folder)} does not have")
        ids.append(int(found))
    return ids
