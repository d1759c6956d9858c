"""Tokenizes the texts of ``Encoder.encode`` as the server's frontends do theirs.

A text is handed to the tokenizer alone: then the tokenizer works in the calling thread, and how many threads are busy is
decided here, not by the library, which would take all cores whatever torch was told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from pathlib import Path

from packhorse_shared.messages import ModelFacts
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer
from packhorse_worker.engine.api.inputs import Asked, Text, Tokens, label_of
from packhorse_worker.engine.pairs import PairTokenizer

_CHARS_PER_THREAD = 8192
"""Below this a thread costs more than it saves."""
_SLICES_PER_THREAD = 4


class TextReader:
    """The tokenizer of a model folder, loaded when the first text comes. Safe to use from several threads at once."""

    def __init__(self, folder: Path, facts: ModelFacts, open_pairs: Callable[[], PairTokenizer]) -> None:
        self._folder = folder
        self._facts = facts
        self._open_pairs = open_pairs
        # A reranker's prompts belong into its pairs.
        name = None if facts.task == "rerank" else facts.default_prompt_name
        self._default_prompt = facts.prompts.get(name, "") if name else ""

    def read(self, asked: Sequence[Asked], *, single: bool, add_special_tokens: bool, threads: int) -> list[Tokens]:
        """The inputs as tokens. Raises ValueError naming the index of one that cannot be read, and ModelFilesError."""
        texts = [(index, each) for index, each in enumerate(asked) if isinstance(each, Text)]
        for index, each in texts:
            if each.pair is not None or each.prompt_name is not None:
                self._check(each, label_of(index, single=single), add_special_tokens=add_special_tokens)
        found = [each if isinstance(each, Tokens) else None for each in asked]
        try:
            read = self._read_all([each for _, each in texts], add_special_tokens, threads)
        except TypeError:
            _refuse_unpaired(texts, single=single)
            raise
        for (index, _), tokens in zip(texts, read, strict=True):
            if not tokens.ids:
                raise ValueError(f"{label_of(index, single=single)} has no tokens")
            found[index] = tokens
        return [each for each in found if each is not None]

    def _check(self, text: Text, label: str, *, add_special_tokens: bool) -> None:
        prompts = self._facts.prompts
        if text.prompt_name is not None and text.prompt_name not in prompts:
            names = ", ".join(sorted(prompts)) or "none"
            raise ValueError(f"{label}: prompt_name {text.prompt_name!r} is not one of this model's prompts ({names})")
        if text.pair is not None and self._facts.task == "embedding":
            raise ValueError(f"{label}: text_pair is for models that read pairs, and this one makes embeddings of single texts")
        if text.pair is not None and not add_special_tokens:
            raise ValueError(f"{label}: a pair needs the special tokens between its texts; leave add_special_tokens True")

    def _read_all(self, texts: Sequence[Text], add_special_tokens: bool, threads: int) -> list[Tokens]:
        """Long work in slices for the threads."""

        def run(part: Sequence[Text]) -> list[Tokens]:
            return [self._read_one(each, add_special_tokens) for each in part]

        threads = min(threads, len(texts), sum(len(each.text) for each in texts) // _CHARS_PER_THREAD)
        if threads <= 1:
            return run(texts)
        step = -(-len(texts) // (_SLICES_PER_THREAD * threads))
        slices = [texts[start : start + step] for start in range(0, len(texts), step)]
        with ThreadPoolExecutor(threads, "tokenizer") as executor:
            return list(chain.from_iterable(executor.map(run, slices)))

    def _read_one(self, text: Text, add_special_tokens: bool) -> Tokens:
        prompt = None if text.prompt_name is None else self._facts.prompts[text.prompt_name]
        if text.pair is not None:
            ids, types = self._pairs.encode([(text.text, text.pair)], prompt)[0]
            return Tokens(ids.tolist(), type_ids=None if types is None else types.tolist())
        if prompt is None:
            prompt = self._default_prompt
        lowercase = self._facts.lowercase
        tokenizer = self._tokenizer.variant(lowercase=lowercase)
        encoding = tokenizer.encode_batch_fast([prompt + text.text], add_special_tokens=add_special_tokens)[0]
        if not prompt:
            return Tokens(encoding.ids)
        count = self._tokenizer.count_prompt_tokens(prompt, lowercase=lowercase, add_special_tokens=add_special_tokens)
        return Tokens(encoding.ids, count)

    @cached_property
    def _tokenizer(self) -> ModelTokenizer:
        return ModelTokenizer(read_tokenizer(self._folder))

    @cached_property
    def _pairs(self) -> PairTokenizer:
        return self._open_pairs()


def _refuse_unpaired(texts: Sequence[tuple[int, Text]], *, single: bool) -> None:
    """Raise for the first text that is no Unicode: the tokenizer only says that one of them is not."""
    for index, each in texts:
        for text in (each.text, each.pair or ""):
            try:
                text.encode()
            except UnicodeEncodeError as problem:
                label = label_of(index, single=single)
                raise ValueError(f"{label} has half of a surrogate pair at character {problem.start}") from None
