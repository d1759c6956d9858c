"""Texts to ids: special tokens, truncation, prompts, long texts, threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers
from tokenizers.normalizers import Normalizer

from edges.frontend_thread import build_tokenizer, save_tokenizer
from packhorse_frontend.bodies.inputs import LengthRule, TokenizedInputs
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import Problem
from packhorse_frontend.tokens.pool import TokenizerPool
from packhorse_frontend.tokens.texts import AbandonedError, TextTokenizer, TextWork, load_tokenizer
from packhorse_shared.errors import ModelFilesError

TEMPLATES = {
    "[CLS] $A [SEP]": ([2], [3]),
    "$A [SEP]": ([], [3]),
    "[CLS] $A": ([2], []),
    None: ([], []),
    "[CLS] [CLS] $A [SEP]": ([2, 2], [3]),
}


def work(
    *texts: str, limit: int = 64, to: int | None = None, special: bool = True, prompt: str = "", lower: bool = False
) -> TextWork:
    naming = Naming.of("input", len(texts), listed=True)
    return TextWork(texts, 0, naming, prompt, lower, special, LengthRule(limit, "max_seq_len", to))


def ids(tokens: TokenizedInputs) -> list[list[int]]:
    found, start = [], 0
    for length in tokens.lengths:
        found.append(tokens.ids[start : start + length].tolist())
        start += length
    assert start == len(tokens.ids)
    return found


def tokenize(tokenizer: TextTokenizer, each: TextWork) -> TokenizedInputs:
    return tokenizer.tokenize(each, lambda: False)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("special", [True, False])
def test_truncation_cuts_the_text_and_keeps_the_special_tokens(template: str | None, special: bool) -> None:
    tokenizer = TextTokenizer(build_tokenizer(template))
    prefix, suffix = TEMPLATES[template] if special else ([], [])
    text = " ".join(f"t{number}" for number in range(10, 60))
    for limit in range(max(1, len(prefix + suffix)), 60):
        tokens = tokenize(tokenizer, work(text, limit=64, to=limit, special=special))
        kept = min(50, limit - len(prefix + suffix))
        assert ids(tokens) == [[*prefix, *range(10, 10 + kept), *suffix]]
        assert tokens.truncated == (kept < 50)


def test_truncation_is_what_the_tokenizer_itself_would_do() -> None:
    ours = TextTokenizer(build_tokenizer())
    theirs = build_tokenizer()
    theirs.no_padding()
    for limit in range(2, 12):
        theirs.enable_truncation(limit)
        for text in ("", "t10", "t10 t11 t12 t13 t14 t15 t16 t17", "[SEP] t10 [SEP] t11"):
            assert ids(tokenize(ours, work(text, to=limit))) == [theirs.encode(text).ids]


def test_a_truncation_below_the_special_tokens_is_refused() -> None:
    tokenizer = TextTokenizer(build_tokenizer())
    with pytest.raises(Problem, match="at least 2"):
        tokenize(tokenizer, work("t10", to=1))
    assert ids(tokenize(tokenizer, work("t10 t11", to=2))) == [[2, 3]]


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    assert ids(tokenize(tokenizer, work("t10", "t11 " * 40))) == [[2, 10, 3], [2, *[11] * 40, 3]]


def test_lower_case_and_prompts() -> None:
    tokenizer = TextTokenizer(build_tokenizer())
    assert ids(tokenize(tokenizer, work("T10 T11", lower=True))) == [[2, 10, 11, 3]]
    assert ids(tokenize(tokenizer, work("T10"))) == [[2, 1, 3]]
    assert ids(tokenize(tokenizer, work("t10", "", prompt="t20 "))) == [[2, 20, 10, 3], [2, 20, 3]]


@pytest.mark.parametrize(
    "own", [None, normalizers.NFC(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])]
)
def test_lower_case_is_what_sentence_transformers_makes_of_it(own: Normalizer | None) -> None:
    """Its Transformer module puts Lowercase before the normalizer; special tokens are found before that, and stay."""
    tokenizer = build_tokenizer()
    tokenizer.normalizer = own
    theirs = Tokenizer.from_str(tokenizer.to_str())
    theirs.no_padding()
    theirs.no_truncation()
    theirs.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own is not None else [])])
    ours = TextTokenizer(tokenizer)
    for text in ("T10 [SEP] t11", "[sep] T10", "[UNK]T10", "\u00c9 T1\u03010", "T10 " * 70_000):
        found = ids(tokenize(ours, work(text, lower=True, limit=100_000)))
        assert found == [theirs.encode(text).ids]
        assert ids(tokenize(ours, work("T10"))) == [[2, 1, 3]]
    assert ours.count_prompt_tokens("T10 [SEP]", lowercase=True, add_special_tokens=False) == 1


def test_the_tokenizer_is_where_the_transformer_is(tmp_path: Path) -> None:
    """Older sentence-transformers folders keep the transformer one level down."""
    (tmp_path / "0_Transformer").mkdir()
    save_tokenizer(tmp_path / "0_Transformer")
    modules = tmp_path / "modules.json"
    for content, is_there in (
        (
            '[{"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}, {"path": "1_Pooling"}]',
            True,
        ),
        ('[{"path": ""}]', False),
        ('[{"path": "../elsewhere"}]', False),
        ('[{"path": "/elsewhere"}]', False),
        ("[]", False),
        ("{}", False),
        ("no json", False),
    ):
        modules.write_text(content)
        if is_there:
            assert ids(tokenize(load_tokenizer(tmp_path), work("t10"))) == [[2, 10, 3]]
        else:
            with pytest.raises(ModelFilesError, match=r"(modules|tokenizer)\.json"):
                load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "special", "prompt", "count"),
    [
        ("[CLS] $A [SEP]", True, "t20 t21 ", 3),
        ("[CLS] $A [SEP]", False, "t20 t21 ", 2),
        ("[CLS] $A", True, "t20 ", 2),
        ("$A [SEP]", True, "t20 ", 1),
        (None, True, "t20", 1),
        ("[CLS] $A [SEP]", True, "", 1),
    ],
)  # fmt: skip
def test_prompt_tokens_are_counted_as_sentence_transformers_does(
    template: str | None, special: bool, prompt: str, count: int
) -> None:
    """Its ``_get_prompt_length``: the prompt by itself, less a special token at the end."""
    tokenizer = TextTokenizer(build_tokenizer(template))
    assert tokenizer.count_prompt_tokens(prompt, lowercase=False, add_special_tokens=special) == count


def test_the_first_input_that_is_too_long_is_named() -> None:
    tokenizer = TextTokenizer(build_tokenizer())
    with pytest.raises(Problem, match=r"input\[1\] has 6 tokens, the limit is 5 \(--max_seq_len\)"):
        tokenize(tokenizer, work("t10", "t10 " * 4, "t10 " * 9, limit=5))
    with pytest.raises(Problem, match=r"input\[1\] has no tokens"):
        tokenize(tokenizer, work("t10", " ", special=False))


def test_long_texts_are_judged_by_their_beginning() -> None:
    tokenizer = TextTokenizer(build_tokenizer())
    with pytest.raises(Problem, match=r"more than \d+ tokens"):
        tokenize(tokenizer, work("t10 " * 200_000))
    tokens = tokenize(tokenizer, work("t10 " * 200_000, to=64))
    assert (ids(tokens), tokens.truncated) == ([[2, *[10] * 62, 3]], 1)


def test_long_texts_of_few_tokens_are_fine() -> None:
    """White space and unknown words shrink: nothing that is valid may be refused for its size, up to a million characters."""
    tokenizer = TextTokenizer(build_tokenizer())
    assert ids(tokenize(tokenizer, work("t10" + " " * 900_000 + "t11"))) == [[2, 10, 11, 3]]
    assert ids(tokenize(tokenizer, work("x" * 900_000))) == [[2, 1, 3]]
    with pytest.raises(Problem, match="1000001 characters"):
        tokenize(tokenizer, work("x" * 1_000_001))
    assert tokenize(tokenizer, work("x" * 1_000_001, to=64)).truncated == 1


def test_no_more_than_a_step_of_ids_are_a_list_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of ints take gigabytes, and hold the interpreter while they become an array."""
    counts: list[int] = []
    fromiter = np.fromiter

    def noting(values: Any, dtype: Any, count: int) -> Any:
        counts.append(count)
        return fromiter(values, dtype=dtype, count=count)

    tokenizer = TextTokenizer(build_tokenizer())
    texts = [f"t{10 + index % 100} " * 60 for index in range(4000)]
    monkeypatch.setattr(np, "fromiter", noting)
    tokens = tokenize(tokenizer, work(*texts))
    assert ids(tokens) == [[2, *[10 + index % 100] * 60, 3] for index in range(4000)]
    assert max(counts) <= 65_536 + 62
    assert sum(counts) == len(tokens.ids)


def test_work_stops_when_nobody_waits() -> None:
    tokenizer = TextTokenizer(build_tokenizer())
    asked = iter([False, True])
    with pytest.raises(AbandonedError):
        tokenizer.tokenize(work(*["t10 " * 20] * 2000), lambda: next(asked))


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_tokenizer_that_cannot_be_read_names_its_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def pooled(works: Sequence[TextWork], tokenizer: Tokenizer, threads: int = 3) -> list[object]:
    async def run() -> list[object]:
        with ThreadPoolExecutor(threads) as executor:
            pool, shared = TokenizerPool(executor, threads), TextTokenizer(tokenizer)
            return await asyncio.gather(*(pool.tokenize(shared, each) for each in works), return_exceptions=True)

    return asyncio.run(run())


def test_slices_of_a_large_request_come_back_in_order() -> None:
    texts = [f"t{10 + number % 100} t{10 + number % 7}" for number in range(3000)]
    [tokens] = pooled([work(*texts)], build_tokenizer())
    assert isinstance(tokens, TokenizedInputs)
    assert ids(tokens) == [[2, 10 + number % 100, 10 + number % 7, 3] for number in range(3000)]


def test_of_several_faults_the_first_is_told() -> None:
    texts = ["t10"] * 3000
    texts[700] = texts[2900] = "t10 " * 100
    [problem] = pooled([work(*texts)], build_tokenizer())
    assert isinstance(problem, Problem)
    assert "input[700]" in problem.message


def test_small_works_share_an_errand_and_keep_their_own_outcome() -> None:
    """One tokenizer, many threads, settings of all kinds."""
    works = [work(f"t{10 + number % 100}", special=number % 2 == 0, to=None if number % 3 else 5) for number in range(500)]
    works.insert(250, work("t10 " * 100))
    outcomes = pooled(works, build_tokenizer())
    assert isinstance(outcomes.pop(250), Problem)
    for number, tokens in enumerate(outcomes):
        assert isinstance(tokens, TokenizedInputs)
        word = 10 + number % 100
        assert ids(tokens) == [[2, word, 3] if number % 2 == 0 else [word]]
