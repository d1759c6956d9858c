"""Pairs of texts to words: the tokenizer's own ids, segments, cutting, refusals, long texts, threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from edges.frontend_thread import WORDS, build_tokenizer
from model_facts import model_facts
from packhorse_frontend.bodies.inputs import LengthRule, TokenizedInputs
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.problems import Problem
from packhorse_frontend.tokens.pair_makers import _runs
from packhorse_frontend.tokens.pairs import PairTokenizer, PairWork
from packhorse_frontend.tokens.pool import TokenizerPool
from packhorse_frontend.tokens.texts import AbandonedError
from packhorse_shared.messages import SEGMENT_SHIFT, ModelFacts, PairSlot, PairText
from packhorse_shared.pair_layout import find_pair_layout
from packhorse_shared.pair_text import join_pair
from packhorse_shared.tokenizing import ModelTokenizer
from trained_tokenizers import PAIR_TOKENIZERS, template, word_piece

QUERY, DOCUMENT, PROMPT = PairSlot.QUERY, PairSlot.DOCUMENT, PairSlot.PROMPT
CHAT = PairText(
    plain=("t40 ", QUERY, " t41 ", DOCUMENT, " t42"), prompted=("t39 ", PROMPT, " t40 ", QUERY, " t41 ", DOCUMENT, " t42")
)
SEGMENT = 1 << SEGMENT_SHIFT


def bert() -> Tokenizer:
    """[CLS] query [SEP] document [SEP], the document with its [SEP] in segment 1."""
    tokenizer = build_tokenizer()
    specials = [(word, WORDS[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=specials
    )
    return tokenizer


def pairs_of(tokenizer: Tokenizer | None = None, **facts: Any) -> PairTokenizer:
    return PairTokenizer(ModelTokenizer(tokenizer or bert()), model_facts(task="rerank", **facts))


def work(
    query: str, *documents: str, limit: int = 64, prompt: str = "", cuts: bool = True, most: int | None = None
) -> PairWork:
    return PairWork(
        texts=[(query, document) for document in documents],
        first_index=0,
        naming=Naming.of("documents", len(documents), listed=True),
        query_naming=Naming.of("query", 1, listed=False),
        prompt=prompt,
        lowercase=False,
        rule=LengthRule(limit, "max_seq_len", None),
        cuts=cuts,
        most_document_tokens=most,
    )


def each_with_its_own(*texts: tuple[str, str], **changes: Any) -> PairWork:
    """One query for each document, as /v1/score has them."""
    names = {
        "naming": Naming.of("text_2", len(texts), listed=True),
        "query_naming": Naming.of("text_1", len(texts), listed=True),
    }
    return replace(work("", "", cuts=False), texts=texts, **names, **changes)


def ids(tokens: TokenizedInputs) -> list[list[int]]:
    ends = np.cumsum(tokens.lengths)[:-1]
    assert tokens.ids.dtype == np.int32
    assert sum(tokens.lengths) == len(tokens.ids)
    return [each.tolist() for each in np.split(tokens.ids, ends)]


def tokenize(pairs: PairTokenizer, each: PairWork) -> TokenizedInputs:
    return pairs.tokenize(each, lambda: False)


def refused(pairs: PairTokenizer, each: PairWork) -> tuple[str, str | None]:
    with pytest.raises(Problem) as caught:
        tokenize(pairs, each)
    assert caught.value.status == 400
    return caught.value.message, caught.value.param


def t(*numbers: int) -> str:
    return " ".join(f"t{number}" for number in numbers)


TEXTS = st.lists(
    st.sampled_from(
        ["the fox", " ", "Hello", "\n", "caf\u00e9", "\u65e5\u672c", "don't", "[SEP]", "</s>", "<s>", "\u0130", "x" * 70]
    )
    | st.text(max_size=6),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("kind", PAIR_TOKENIZERS)
def test_words_are_the_tokenizers_own_ids_and_types(kind: str) -> None:
    """Of every pair, whatever puts its special tokens around it, though each text is tokenized by itself."""
    own = PAIR_TOKENIZERS[kind]()
    ours = ModelTokenizer(Tokenizer.from_str(own.to_str()))
    served = {segments: PairTokenizer(ours, model_facts(task="rerank", segments=segments)) for segments in (1, 2)}
    rule = LengthRule(10_000, "max_seq_len", None)

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.sampled_from(["", "query: ", "a"]), st.booleans())
    def check(texts: list[tuple[str, str]], prompt: str, lowercase: bool) -> None:
        reader = ours.variant(lowercase=lowercase)
        expected = [reader.encode(prompt + query, document) for query, document in texts]
        for segments, pairs in served.items():
            asked = each_with_its_own(*texts, prompt=prompt, lowercase=lowercase, rule=rule)
            if any(not each.ids for each in expected):
                assert "have no tokens" in refused(pairs, asked)[0]
                continue
            types = [[value if segments > 1 else 0 for value in each.type_ids] for each in expected]
            words = [
                [one + (kind << SEGMENT_SHIFT) for one, kind in zip(each.ids, own_types, strict=True)]
                for each, own_types in zip(expected, types, strict=True)
            ]
            assert ids(tokenize(pairs, asked)) == words

    check()


def test_a_template_that_cannot_be_told_is_none() -> None:
    assert find_pair_layout(template(word_piece(lowercase=True), "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP] $A [SEP]")) is None


def test_segments_are_in_the_words_where_the_model_has_them() -> None:
    asked = work(t(10), t(11, 12))
    assert ids(tokenize(pairs_of(), asked)) == [[2, 10, 3, 11, 12, 3]]
    assert ids(tokenize(pairs_of(segments=2), asked)) == [[2, 10, 3, SEGMENT + 11, SEGMENT + 12, SEGMENT + 3]]


def test_prompts_and_lower_case() -> None:
    asked = work("T10", "T11", prompt="t20 ")
    assert ids(tokenize(pairs_of(), asked)) == [[2, 20, 1, 3, 1, 3]]
    assert ids(tokenize(pairs_of(), replace(asked, lowercase=True))) == [[2, 20, 10, 3, 11, 3]]
    assert ids(tokenize(pairs_of(pair_text=CHAT), replace(asked, lowercase=True))) == [[39, 20, 40, 10, 41, 11, 42]]
    assert ids(tokenize(pairs_of(pair_text=CHAT), work("t10", "t11"))) == [[40, 10, 41, 11, 42]]


FORMS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "template": ({}, [2, 10, 3], [3]),
    "chat template": ({"pair_text": CHAT}, [40, 10, 41], [42]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_document_is_cut_at_its_end_and_all_else_stays(form: str) -> None:
    facts, before, behind = FORMS[form]
    pairs = pairs_of(**facts)
    document = list(range(50, 90))
    for limit in range(len(before + behind) + 1, 50):
        tokens = tokenize(pairs, work("t10", "t60", t(*document), "t61", limit=limit))
        room = limit - len(before + behind)
        assert ids(tokens) == [
            [*before, 60, *behind],
            [*before, *document[:room], *behind],
            [*before, 61, *behind],
        ]
        assert (tokens.truncated, tokens.cut) == ((1, (1,)) if room < 40 else (0, ()))


@pytest.mark.parametrize("form", FORMS)
def test_most_tokens_of_a_document(form: str) -> None:
    facts, before, behind = FORMS[form]
    pairs = pairs_of(**facts)
    for cuts in (True, False):
        tokens = tokenize(pairs, work("t10", t(50, 51), t(*range(50, 120)), t(50, 51, 52), most=2, cuts=cuts))
        assert ids(tokens) == [[*before, 50, 51, *behind]] * 3
        assert tokens.cut == (1, 2)
    assert ids(tokenize(pairs, work("t10", t(*range(50, 60)), most=8, limit=len(before + behind) + 3)))[0][-4:] == [
        50,
        51,
        52,
        *behind,
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_leaves_no_room_is_refused(form: str) -> None:
    facts, before, behind = FORMS[form]
    pairs = pairs_of(**facts)
    around = len(before + behind) - 1
    full = t(*[10] * (20 - around))
    message, param = refused(pairs, work(full, "t50", limit=20))
    assert message.startswith(
        f"query has {20 - around} tokens; with the {around} around the texts that leaves no room for a document"
    )
    assert "a pair may have 20 (--max_seq_len)" in message
    assert param == "query"
    assert tokenize(pairs, work(full, t(50, 51), limit=21)).cut == (0,)
    message, param = refused(pairs, each_with_its_own(("t10", "t50"), (full, "t50"), rule=LengthRule(20, "max_seq_len", None)))
    assert message.startswith("text_1[1] has")
    assert param == "text_1"


@pytest.mark.parametrize("form", FORMS)
def test_a_document_that_is_too_long_is_refused_where_it_may_not_be_cut(form: str) -> None:
    pairs = pairs_of(**FORMS[form][0])
    asked = each_with_its_own(("t10", "t50"), ("t10", t(*range(50, 90))), rule=LengthRule(30, "max_num_tokens", None))
    message, param = refused(pairs, asked)
    assert message.startswith("text_2[1] and its query have 44 tokens, the limit is 30 (--max_num_tokens); shorten one")
    assert param == "text_2"
    cut = tokenize(pairs, replace(asked, rule=LengthRule(30, "max_num_tokens", 10)))
    assert (cut.lengths[1], cut.cut) == (10, (1,))
    assert "have 44 tokens" in refused(pairs, replace(asked, rule=LengthRule(30, "max_num_tokens", 31)))[0]
    full = each_with_its_own((t(*[10] * 10), "t50"), rule=LengthRule(30, "max_seq_len", 8))
    assert refused(pairs, full) == (
        "truncate_prompt_tokens is 8, but text_1[0] and what stands around the texts are 13 tokens; use at least 14",
        "truncate_prompt_tokens",
    )


def test_nothing_to_read_is_refused() -> None:
    bare = pairs_of(build_tokenizer(None))
    message, param = refused(bare, work("", "t10", " "))
    assert message == "documents[1] and its query have no tokens"
    assert param == "documents"
    assert ids(tokenize(pairs_of(), work("", "", "t10"))) == [[2, 3, 3], [2, 3, 10, 3]]


LONG = "t50 " * 300_000


@pytest.mark.parametrize("form", FORMS)
def test_long_documents_are_judged_by_their_beginning(form: str) -> None:
    facts, before, behind = FORMS[form]
    pairs = pairs_of(**facts)
    tokens = tokenize(pairs, work("t10", "t60", LONG, "t50" + " " * 900_000 + "t51", "x" * 1_000_001, limit=20))
    room = 20 - len(before + behind)
    assert ids(tokens) == [[*before, *document, *behind] for document in ([60], [50] * room, [50, 51], [1])]
    assert tokens.cut == (1, 3)
    assert "documents[1] and its query have more than" in refused(pairs, work("t10", "t60", LONG, limit=20, cuts=False))[0]
    message, param = refused(pairs, work("t10", "x" * 1_000_001, limit=20, cuts=False))
    assert message.startswith("documents[0] has 1000001 characters")
    assert param == "documents"


@pytest.mark.parametrize("form", FORMS)
def test_long_queries_are_judged_by_their_beginning(form: str) -> None:
    pairs = pairs_of(**FORMS[form][0])
    message, param = refused(pairs, work(LONG, "t50", limit=20))
    assert message.startswith("query has")
    assert param == "query"
    message, param = refused(pairs, work("x" * 1_000_001, "t50", limit=20))
    assert message.startswith("query has 1000001 characters")
    assert param == "query"
    assert ids(tokenize(pairs, work("t10" + " " * 900_000, "t50", limit=20)))[0].count(10) == 1


def test_a_query_that_a_chat_template_repeats_too_often_is_refused() -> None:
    """Also in a run of the request's pairs, which does not see the others."""
    query, count = "t10" + " " * 40_000, 500
    asked = replace(work(query, *["t50"] * 2), naming=Naming.of("documents", count, listed=True))
    message, param = refused(pairs_of(pair_text=CHAT), asked)
    assert message.startswith(f"query has 40003 characters, and comes again with each of {count} documents")
    assert str(1 << 24) in message
    assert param == "query"
    assert tokenize(pairs_of(), asked).lengths == [5, 5]
    assert tokenize(pairs_of(pair_text=CHAT), work(query, "t50", "t51")).lengths == [5, 5]


def test_a_query_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of()
    seen: list[str] = []

    class Spy:
        def __init__(self, *, lowercase: bool) -> None:
            assert not lowercase

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            seen.extend(texts)
            return bert().encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(pairs._tokenizer, "variant", Spy)
    tokenize(pairs, work("t10", "t50", "t51", "t52"))
    assert sorted(seen) == ["t10", "t50", "t51", "t52"]


def test_a_document_that_a_chat_template_shows_twice_is_cut_in_both_places() -> None:
    form = msgspec.structs.replace(CHAT, plain=(DOCUMENT, " t40 ", QUERY, " t41 ", DOCUMENT, " t42"))
    tokens = tokenize(pairs_of(pair_text=form), work("t10", t(50, 51, 52, 53), limit=9))
    assert ids(tokens) == [[50, 51, 40, 10, 41, 50, 51, 42]]
    message, _ = refused(pairs_of(pair_text=form), work(t(10, 10, 10, 10), t(50, 51, 52, 53), limit=8))
    assert message.startswith("query has 4 tokens; with the 3 around the texts")


SEAMS = PairText(plain=("<q>", QUERY, "</q>\n the fox: ", DOCUMENT, "\n\nthe fox?"), prompted=(PROMPT, QUERY, DOCUMENT, " the"))


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-r", "qwen", "llama", "gemma"])
def test_what_is_cut_of_a_chat_templates_text_is_the_documents_end(kind: str) -> None:
    """Whatever tokens reach over the seams: those stay, and nothing but tokens of the document goes."""
    ours = ModelTokenizer(PAIR_TOKENIZERS[kind]())
    pairs = PairTokenizer(ours, model_facts(task="rerank", pair_text=SEAMS))

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, TEXTS, st.sampled_from(["", "be fair"]), st.integers(1, 30), st.booleans())
    def check(query: str, document: str, prompt: str, over: int, lowercase: bool) -> None:
        joined, [(first, last)] = join_pair(SEAMS, query, document, prompt)
        whole = ours.variant(lowercase=lowercase).encode(joined, add_special_tokens=False)
        own = [start >= first and end <= last and end > start for start, end in whole.offsets]
        if not any(own):
            return
        start, stop = own.index(True), len(own) - own[::-1].index(True)
        asked = work(query, document, prompt=prompt, limit=max(1, len(whole) - over))
        asked = replace(asked, lowercase=lowercase)
        kept = stop - start - over
        if kept < 1:
            assert refused(pairs, asked)[1] == "query"
            return
        assert ids(tokenize(pairs, asked)) == [whole.ids[: start + kept] + whole.ids[stop:]]

    check()


def test_where_a_long_document_stands_is_found_without_a_list_of_all_offsets() -> None:
    """Such a list, of half a million tokens, holds the interpreter for a quarter of a second."""

    class Watched:
        def __init__(self, encoding: Any) -> None:
            self._encoding = encoding
            self.asked = 0

        def __len__(self) -> int:
            return len(self._encoding)

        def token_to_chars(self, token: int) -> tuple[int, int] | None:
            self.asked += 1
            return self._encoding.token_to_chars(token)

    joined, places = join_pair(SEAMS, "the fox", "the fox " * 20_000, "")
    watched = Watched(
        ModelTokenizer(PAIR_TOKENIZERS["bert"]()).variant(lowercase=False).encode(joined, add_special_tokens=False)
    )
    [(start, end)] = _runs(cast("Any", watched), places)
    assert end - start > 30_000
    assert watched.asked < 100


def test_joining_strips_where_the_template_does() -> None:
    form = PairText(plain=("q:", QUERY, " d:", DOCUMENT), prompted=(PROMPT, "|", QUERY, "|", DOCUMENT), strips=True)
    assert join_pair(form, " a\n", "\tb ", "") == ("q:a d:b", ((6, 7),))
    assert join_pair(form, "a", "", " p ") == ("p|a|", ((4, 4),))
    assert join_pair(PairText(plain=form.plain, prompted=form.prompted), " a", "b ", "").text == "q: a d:b "


def test_work_stops_when_nobody_waits() -> None:
    for facts in ({}, {"pair_text": CHAT}):
        asked = iter([False, False, True])
        with pytest.raises(AbandonedError):
            pairs_of(**facts).tokenize(work("t10", *["t50 " * 20] * 4000), lambda asked=asked: next(asked))


def test_a_chat_templates_query_counts_for_each_step() -> None:
    """A short document's pair is as much work as a long one's where the query comes again."""
    asked = work("t10 " * 10_000, *["t50"] * 4, limit=50_000)
    for facts, steps in (({}, 1), ({"pair_text": CHAT}, 4)):
        looks: list[None] = []
        pairs_of(**facts).tokenize(asked, lambda looks=looks: bool(looks.append(None)))
        assert len(looks) == steps


def test_slices_of_a_large_request_come_back_in_order() -> None:
    documents = [t(10 + number % 100) for number in range(3000)]
    documents[1700] = t(*range(10, 100))
    asked = work("t10", *documents, limit=20)

    async def run() -> list[TokenizedInputs]:
        with ThreadPoolExecutor(3) as executor:
            pool = TokenizerPool(executor, 3)
            readers = [pairs_of(), pairs_of(pair_text=CHAT)]
            return await asyncio.gather(*(pool.tokenize(reader, asked) for reader in readers))

    for tokens, before, behind in zip(asyncio.run(run()), ([2, 10, 3], [40, 10, 41]), ([3], [42]), strict=True):
        found = ids(tokens)
        assert tokens.cut == (1700,)
        assert found[1700] == [*before, *range(10, 26), *behind]
        del found[1700]
        assert found == [[*before, 10 + number % 100, *behind] for number in range(3000) if number != 1700]


def test_facts_of_the_form_travel() -> None:
    facts = model_facts(pair_text=CHAT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=ModelFacts) == facts
    assert ids(
        tokenize(pairs_of(pair_text=msgspec.msgpack.decode(msgspec.msgpack.encode(CHAT), type=PairText)), work("t10", "t11"))
    )
