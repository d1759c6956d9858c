"""Compares the two readings of a model's tokenizer: tokenizer.json as it is, which the frontends use, and transformers' own.

transformers builds a tokenizer anew from tokenizer.json, tokenizer_config.json and the tokenizer's class, and
sentence-transformers encodes with that one. Where the two make other ids of a text, its vector would silently be another one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import MAX_SEGMENTS
from packhorse_shared.model_folder import tokenizer_file
from packhorse_shared.settings import ModelSettings
from packhorse_shared.tokenizing import ModelTokenizer, read_tokenizer
from packhorse_worker.engine.files.model_folder import ModelFolder
from packhorse_worker.engine.pair_facts import PairFacts, find_pair_facts, find_segments, refuse_pairs
from packhorse_worker.engine.pairs import PairTokenizer, build_tokenizer
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_PLAIN = ("Hello, World! It's the 2nd of 3 tests.", "where is the quick brown fox")
_RARE = (
    "  two  spaces,\ta tab\n",
    "Caf\u00e9 \ufb01 \uff11\uff12 \u65e5\u672c\u8a9e \u03a3\u0391\u03a3 e\u0301",
    "\U0001f40e.",
)
_LISTED_IDS = 12


def check_tokenizer(folder: ModelFolder, settings: ModelSettings, rows: int, token_types: int = 0) -> PairFacts:
    """Compare what both make of a few texts, and tell how pairs are made. ``rows``: of the model's embedding table; for
    ``token_types`` see ``count_segments``.

    Raises ModelFilesError when plain text differs, when a reranker's pairs do, or when the tokenizer marks tokens of a single
    text with types. Texts of rarer characters only warn: there transformers has changed its mind between versions.
    """
    path = tokenizer_file(folder.path)
    served = ModelTokenizer(read_tokenizer(folder.path)).variant(lowercase=False)
    if served.get_vocab_size() > rows:
        log.warning(
            "the tokenizer has more tokens than the model has embeddings; texts with one of the others fail",
            extra={"tokens": served.get_vocab_size(), "rows": rows},
        )
    try:
        built = build_tokenizer(folder, settings)
        readings = {text: _read(built, text) for text in (*_PLAIN, *_RARE, *_special(served))}
    except ModelFilesError:
        raise
    except Exception as problem:
        # Whatever keeps transformers from reading these files does not keep us from serving tokenizer.json.
        reason = f"{type(problem).__name__}: {first_line(problem)}"
        log.warning("transformers cannot read the tokenizer, so its ids were not compared", extra={"reason": reason})
        return refuse_pairs(f"transformers cannot read the tokenizer: {reason}") if folder.task == "rerank" else PairFacts()
    for text, expected in readings.items():
        ids = served.encode(text).ids
        if ids == expected:
            continue
        if text in _PLAIN:
            raise _differ(path, repr(text), ids, expected)
        log.warning(
            "tokenizer.json, which is served, and transformers make different ids of a rare text",
            extra={"text": ascii(text), "ids": _shown(ids), "transformers": _shown(expected)},
        )
    if folder.task == "embedding":
        return PairFacts()
    if folder.task != "rerank":
        return find_segments(built, token_types, rows)
    try:
        pairs = PairTokenizer(served, built, folder, token_types=MAX_SEGMENTS)
    except ModelFilesError as problem:
        if (folder.path / "modules.json").is_file():
            raise
        # A chat template that was never meant for pairs.
        return refuse_pairs(str(problem).replace(f"{folder.transformer}/", ""))
    _check_pairs(folder, pairs, built)
    return find_pair_facts(pairs, served, built, token_types, rows)


def _check_pairs(folder: ModelFolder, pairs: PairTokenizer, built: Any) -> None:
    """Compare what both make of a pair."""
    (ids, types), *others = pairs.encode([_PLAIN, (_PLAIN[1], _PLAIN[1]), (_PLAIN[0], _PLAIN[0])], "")
    [text] = pairs.join([_PLAIN], "")
    expected = built(text, add_special_tokens=False) if isinstance(text, str) else built(*text)
    made = ids.tolist(), [] if types is None else types.tolist()
    wanted = list(expected["input_ids"]), list(expected.get("token_type_ids") or ())
    for what, found, right in zip(("the pair", "the token types of the pair"), made, wanted, strict=True):
        if found != right:
            raise _differ(tokenizer_file(folder.path), f"{what} {_PLAIN!r}", found, right)
    for role, (changed, _) in zip(("query", "document"), others, strict=True):
        if changed.tolist() == ids.tolist():
            raise ModelFilesError(f"{tokenizer_file(folder.path)}: its template for pairs loses the {role}")


def _differ(path: Path, text: str, ids: list[int], expected: list[int]) -> ModelFilesError:
    return ModelFilesError(
        f"{path} makes {_shown(ids)} of {text}, but transformers, which reads tokenizer_config.json too, makes "
        f"{_shown(expected)}; make them agree: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _read(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer(text)
    if any(encoded.get("token_type_ids") or ()):
        raise ModelFilesError(
            "the tokenizer marks tokens of a single text with token_type_ids other than 0, which is not served"
        )
    ids: list[int] = encoded["input_ids"]
    return ids


def _special(tokenizer: Tokenizer) -> tuple[str, ...]:
    """A text that holds a special token's text."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return tuple(f"a {token} b" for token in special[-1:])


def _shown(ids: list[int]) -> str:
    more = "" if len(ids) <= _LISTED_IDS else f", ... {len(ids)} ids"
    return f"[{', '.join(map(str, ids[:_LISTED_IDS]))}{more}]"
