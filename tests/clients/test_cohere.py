"""Cohere's client, as its makers ship it: rerank v1 and v2, and what it makes of our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import cohere
import numpy as np
import pytest
from cohere.errors import BadRequestError, NotFoundError

from stack import Stack

pytestmark = pytest.mark.process

QUERY = "t10 t11"
DOCUMENTS = ["t20 t21 t22", "t30", "t40 t41 t42 t43 t44", "t50 t51"]
TOO_LONG = " ".join(["t60"] * 300)


@pytest.fixture(scope="module")
def v1(reranker_stack: Stack) -> Iterator[cohere.Client]:
    with cohere.Client("unused", base_url=reranker_stack.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def v2(reranker_stack: Stack) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2("unused", base_url=reranker_stack.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def ranking(reranker_model: Path) -> list[tuple[int, float]]:
    """What sentence-transformers ranks these documents as: places and scores, best first."""
    from sentence_transformers import CrossEncoder

    scores = CrossEncoder(str(reranker_model), device="cpu").predict([(QUERY, document) for document in DOCUMENTS])
    return [(int(place), float(scores[place])) for place in np.argsort(-scores)]


def _assert_ranked(results: list[cohere.RerankResponseResultsItem], ranking: list[tuple[int, float]]) -> None:
    assert [result.index for result in results] == [place for place, _ in ranking]
    scores = [result.relevance_score for result in results]
    np.testing.assert_allclose(scores, [score for _, score in ranking], atol=1e-5)


def test_v1(v1: cohere.Client, ranking: list[tuple[int, float]]) -> None:
    answer = v1.rerank(model="reranker", query=QUERY, documents=DOCUMENTS)
    _assert_ranked(answer.results, ranking)
    assert answer.id
    assert all(result.document is None for result in answer.results)
    assert answer.meta is not None
    assert answer.meta.tokens is not None
    assert answer.meta.tokens.input_tokens == sum(3 + len(f"{QUERY} {document}".split()) for document in DOCUMENTS)


def test_v1_gives_documents_back(v1: cohere.Client, ranking: list[tuple[int, float]]) -> None:
    """As they came, texts and objects mixed; and no more than ``top_n``."""
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "t1"}, *DOCUMENTS[2:]]
    answer = v1.rerank(model="reranker", query=QUERY, documents=documents, top_n=3, return_documents=True)
    _assert_ranked(answer.results, ranking[:3])
    assert [result.document and result.document.text for result in answer.results] == [DOCUMENTS[n] for n, _ in ranking[:3]]


def test_v2(v2: cohere.ClientV2, ranking: list[tuple[int, float]]) -> None:
    answer = v2.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2)
    _assert_ranked(answer.results, ranking[:2])
    assert answer.id
    assert answer.meta is not None
    assert answer.model_fields_set <= {"id", "results", "meta"}


def test_v2_async(reranker_stack: Stack, ranking: list[tuple[int, float]]) -> None:
    async def rank_often() -> list[cohere.V2RerankResponse]:
        async with cohere.AsyncClientV2("unused", base_url=reranker_stack.url, timeout=30) as client:
            asked = (client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS) for _ in range(20))
            return await asyncio.gather(*asked)

    for answer in asyncio.run(rank_often()):
        _assert_ranked(answer.results, ranking)


def test_documents_that_are_cut_are_told(v2: cohere.ClientV2) -> None:
    answer = v2.rerank(model="reranker", query=QUERY, documents=[DOCUMENTS[0], TOO_LONG])
    assert answer.meta is not None
    assert answer.meta.warnings is not None
    assert "document 1 was cut" in answer.meta.warnings[0]


def test_errors(v1: cohere.Client, v2: cohere.ClientV2) -> None:
    with pytest.raises(NotFoundError) as unknown:
        v2.rerank(model="no-such-model", query=QUERY, documents=DOCUMENTS)
    assert unknown.value.body["error"]["code"] == "model_not_found"
    for client in (v1, v2):
        with pytest.raises(BadRequestError) as empty:
            client.rerank(model="reranker", query=QUERY, documents=[])
        assert empty.value.body["error"]["param"] == "documents"
        with pytest.raises(BadRequestError) as too_long:
            client.rerank(model="reranker", query=TOO_LONG, documents=DOCUMENTS)
        assert too_long.value.body["error"]["param"] == "query"


def test_no_results_asked_for(v1: cohere.Client, v2: cohere.ClientV2) -> None:
    """A ``top_n`` of 0 is all of them in v1, and refused in v2."""
    assert len(v1.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=0).results) == len(DOCUMENTS)
    with pytest.raises(BadRequestError):
        v2.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=0)
