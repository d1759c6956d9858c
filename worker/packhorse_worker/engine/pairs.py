"""A (query, document) pair as token ids, the way sentence-transformers' CrossEncoder feeds it to the model.

Either the pair template of tokenizer.json joins the two texts, or the folder's chat template makes one text of them, from
messages of the roles ``query`` and ``document``, which is tokenized without further special tokens. A model's prompt stands
before the query, and in a chat template in a message of the role ``system``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import MAX_SEGMENTS
from packhorse_shared.settings import ModelSettings
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer
from packhorse_worker.engine.files.companion import PairTemplate
from packhorse_worker.engine.files.model_folder import ModelFolder

Pair = tuple[str, str]
PairIds = tuple[NDArray[np.int32], NDArray[np.int64] | None]
"""Token ids ``(tokens,)``, and their types where the model is told them."""

_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
"""A pair, and two that differ from it in one text."""


class PairTokenizer:
    """Makes ids of pairs. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, built: Any, folder: ModelFolder, *, token_types: int) -> None:
        """``tokenizer`` is tokenizer.json, not cutting or padding; ``built`` is what transformers makes of the folder. For
        ``token_types`` see ``count_segments``.

        Raises ModelFilesError for a chat template in which the query or the document is lost.
        """
        self._tokenizer = tokenizer
        self._has_token_types = count_segments(token_types, built) > 1
        self._default_prompt = folder.prompts.get(folder.default_prompt_name or "", "")
        self._chat = None if folder.pair_template is None else _Chat(built, folder.pair_template, folder.transformer)

    @property
    def uses_chat_template(self) -> bool:
        """Whether a chat template joins the texts, and not the tokenizer itself."""
        return self._chat is not None

    def encode(self, pairs: Sequence[Pair], prompt: str | None = None) -> list[PairIds]:
        """The ids of each pair, not cut. ``prompt`` None is the model's default prompt, where it has one."""
        prompt = self._default_prompt if prompt is None else prompt
        texts = self.join(pairs, prompt)
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=self._chat is None)
        return [self._ids(each) for each in encoded]

    def join(self, pairs: Sequence[Pair], prompt: str) -> Sequence[str | Pair]:
        """What is tokenized: texts that a chat template made of the pairs, or the pairs with the prompt before the query."""
        if self._chat is not None:
            return [self._chat.render(pair, prompt) for pair in pairs]
        return [(prompt + query, document) for query, document in pairs]

    def _ids(self, encoded: Encoding) -> PairIds:
        types = np.array(encoded.type_ids, dtype=np.int64) if self._has_token_types else None
        return np.array(encoded.ids, dtype=np.int32), types


def count_segments(token_types: int, built: Any) -> int:
    """How many segments a model tells apart, 1 for none: with more it is told which of a pair's texts each token belongs to.

    ``token_types``: rows of the table of token types that its forward reads, 0 for none. ``built``: its tokenizer as
    transformers builds it, which must know of them too, as only then transformers makes them.
    """
    return min(token_types, MAX_SEGMENTS) if token_types > 1 and "token_type_ids" in built.model_input_names else 1


def open_pairs(folder: ModelFolder, settings: ModelSettings, *, token_types: int) -> PairTokenizer:
    """The pair tokenizer of a folder. For ``token_types`` see ``count_segments``.

    Raises ModelFilesError as ``PairTokenizer`` does, and when the folder has no tokenizer.
    """
    tokenizer = ModelTokenizer(read_tokenizer(folder.path)).variant(lowercase=folder.lowercase)
    return PairTokenizer(tokenizer, build_tokenizer(folder, settings), folder, token_types=token_types)


class _Chat:
    """The chat template of a folder."""

    def __init__(self, built: Any, template: PairTemplate, folder: Path) -> None:
        self._built = built
        self._arguments = template.arguments
        problems = []
        for form in ("flat", "structured") if template.format == "auto" else (template.format,):
            self._format: Literal["flat", "structured"] = form
            problem = self._find_loss()
            if problem is None:
                return
            problems.append(problem)
        raise ModelFilesError(f"{_place(folder)}: the chat template cannot carry a pair: {problems[0]}")

    def render(self, pair: Pair, prompt: str) -> str:
        """The text of a pair."""
        roles = (("query", pair[0]), ("document", pair[1]))
        messages = [{"role": role, "content": self._content(text)} for role, text in roles]
        if prompt:
            messages.insert(0, {"role": "system", "content": self._content(prompt)})
        text: str = self._built.apply_chat_template(messages, tokenize=False, **self._arguments)
        return text

    def _content(self, text: str) -> Any:
        return text if self._format == "flat" else [{"type": "text", "text": text}]

    def _find_loss(self) -> str | None:
        """Which of the roles does not reach the text, found by rendering: a template may pass a role on without naming it."""
        try:
            first, *others = [self.render(pair, "") for pair in _PROBES]
        except Exception as problem:  # whatever a template of somebody else raises
            return f"it raises {type(problem).__name__}: {str(problem).strip().partition(chr(10))[0][:200]}"
        lost = [role for role, text in zip(("query", "document"), others, strict=True) if text == first]
        return f"a message of the role {lost[0]} is lost" if lost else None


def build_tokenizer(folder: ModelFolder, settings: ModelSettings) -> Any:
    """The tokenizer as transformers builds it, and sentence-transformers with it."""
    from transformers.models.auto.tokenization_auto import AutoTokenizer  # noqa: PLC0415 (20 ms, while the device warms up)

    trusted = settings.trust_remote_code
    common = {"local_files_only": not trusted, "trust_remote_code": trusted}
    return AutoTokenizer.from_pretrained(folder.transformer, **{**folder.tokenizer_kwargs, **common})


def _place(transformer: Path) -> Path:
    """The file that has the chat template."""
    path = transformer / "chat_template.jinja"
    return path if path.is_file() else transformer / "tokenizer_config.json"
