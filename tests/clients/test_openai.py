"""OpenAI's client, and LangChain's that is built on it, as their makers ship them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
import tiktoken
from langchain_openai import OpenAIEmbeddings

from stack import Stack

pytestmark = pytest.mark.process

MODEL = "all-MiniLM-L6-v2"


def test_openai_client_sync(minilm_stack: Stack) -> None:
    """The client asks for base64 by default and decodes it itself."""
    with minilm_stack.client() as client:
        answer = client.embeddings.create(model=MODEL, input=["a fox", "an old bridge"])
        floats = client.embeddings.create(model=MODEL, input=["a fox", "an old bridge"], encoding_format="float")
    assert answer.model == MODEL
    assert [item.index for item in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 5
    for one, other in zip(answer.data, floats.data, strict=True):
        assert len(one.embedding) == 384
        np.testing.assert_array_equal(np.float32(one.embedding), np.float32(other.embedding))


def test_openai_client_async(minilm_stack: Stack) -> None:
    async def embed_all() -> list[Any]:
        async with minilm_stack.async_client() as client:
            return await asyncio.gather(*(client.embeddings.create(model=MODEL, input=f"bag {n}") for n in range(20)))

    answers = asyncio.run(embed_all())
    vectors = np.array([answer.data[0].embedding for answer in answers])
    assert vectors.shape == (20, 384)
    assert len(np.unique(vectors.round(4), axis=0)) == 20


def test_openai_client_lists_the_model(minilm_stack: Stack) -> None:
    with minilm_stack.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


def test_openai_client_understands_the_errors(minilm_stack: Stack) -> None:
    with minilm_stack.client() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.embeddings.create(model="no-such-model", input="x")
        with pytest.raises(openai.BadRequestError) as too_long:
            client.embeddings.create(model=MODEL, input=["short", "fox " * 400])
    assert unknown.value.code == "model_not_found"
    assert too_long.value.param == "input"
    assert all(fact in too_long.value.message for fact in ("402", "256", "1"))


def test_langchain_sends_token_arrays(minilm_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain's default: it cuts texts into its own token ids and sends those. They are used verbatim.

    Its tokenizer comes from a download, so the test gives it a small one whose tokens are single bytes.
    """
    bytewise = tiktoken.Encoding(
        name="bytewise", pat_str=r"[\s\S]", mergeable_ranks={bytes([value]): value for value in range(256)}, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _name: bytewise)
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=f"{minilm_stack.url}/v1", api_key="unused")
    texts = ["a fox", "an old bridge near rivers", "rain"]
    vectors = embeddings.embed_documents(texts)
    with minilm_stack.client() as client:
        answer = client.embeddings.create(model=MODEL, input=[bytewise.encode(text) for text in texts])
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    np.testing.assert_allclose(vectors, [item.embedding for item in answer.data], atol=1e-6)


def test_langchain_with_texts(minilm_stack: Stack) -> None:
    """With ``check_embedding_ctx_length=False``, as docs/clients.md tells, the texts themselves arrive."""
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{minilm_stack.url}/v1", api_key="unused", check_embedding_ctx_length=False
    )
    query = embeddings.embed_query("a fox")
    with minilm_stack.client() as client:
        direct = client.embeddings.create(model=MODEL, input="a fox").data[0].embedding
    np.testing.assert_allclose(query, direct, atol=1e-6)
