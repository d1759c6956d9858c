"""Rerankers and classifiers over HTTP: their scores and probabilities are those of sentence-transformers and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from conftest import StackFactory
from tiny_heads import build_causal_reranker, build_cross_encoder, build_head

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

QUERY = "t10 t11"
DOCUMENTS = ["t20", "t30 t31 t32", "t40 " * 20, "", "t11 t10", "t50 t20"]
RERANKERS: dict[str, Callable[[Path], Path]] = {
    "bert": lambda folder: build_cross_encoder(folder, "new"),
    "chat": lambda folder: build_causal_reranker(folder, "new"),
}


def predict(folder: Path) -> np.ndarray:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu")
    return np.asarray(model.predict([(QUERY, document) for document in DOCUMENTS]), dtype=np.float32).reshape(-1)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_a_cross_encoder(tmp_path: Path, make_stack: StackFactory, name: str) -> None:
    folder = RERANKERS[name](tmp_path / "model")
    expected = predict(folder)
    stack = make_stack(model=folder).start().wait_ready()
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            answer = http.post(path, json={"query": QUERY, "documents": DOCUMENTS})
            assert answer.status_code == 200, answer.text
            results = answer.json()["results"]
            found = {result["index"]: result["relevance_score"] for result in results}
            assert np.abs(np.array([found[index] for index in range(len(DOCUMENTS))]) - expected).max() <= 1e-5
            assert [result["relevance_score"] for result in results] == sorted(found.values(), reverse=True)
        answer = http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS})
        scores = [item["score"] for item in answer.json()["data"]]
        assert np.abs(np.array(scores) - expected).max() <= 1e-5
        refused = http.post("/v1/classify", json={"input": "t10"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "wrong_task")


def pipeline(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    from transformers import pipeline as make_pipeline

    found: Any = make_pipeline("text-classification", model=str(folder), top_k=None, device="cpu")(texts)
    return [{each["label"]: each["score"] for each in one} for one in found]


def test_classes_are_those_of_the_pipeline(tmp_path: Path, make_stack: StackFactory) -> None:
    folder = build_head(tmp_path / "model", "roberta-classifier")
    texts = ["t10 t11", "t20", "t30 t31 t32 t33"]
    expected = pipeline(folder, texts)
    stack = make_stack(model=folder).start().wait_ready()
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        answer = http.post("/v1/classify", json={"input": texts})
        assert answer.status_code == 200, answer.text
        for item, scores in zip(answer.json()["data"], expected, strict=True):
            assert sorted(item["probs"]) == pytest.approx(sorted(scores.values()), abs=1e-5)
            assert item["label"] == max(scores, key=lambda label: scores[label])
            assert item["num_classes"] == len(scores)


def test_cosines_are_those_of_the_vectors(make_stack: StackFactory) -> None:
    stack = make_stack().start().wait_ready()
    texts = ["A horse carries the load.", "Ein Pferd trägt die Last.", "The sea is calm."]
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        vectors = np.array([item["embedding"] for item in http.post("/v1/embeddings", json={"input": texts}).json()["data"]])
        scores = [item["score"] for item in http.post("/v1/score", json={"text_1": texts[0], "text_2": texts}).json()["data"]]
        assert scores == pytest.approx(list(vectors @ vectors[0]), abs=1e-6)
        tokens = http.post("/tokenize", json={"input": texts}).json()["data"]
        by_ids = http.post("/v1/embeddings", json={"input": [item["tokens"] for item in tokens]}).json()["data"]
        assert np.abs(np.array([item["embedding"] for item in by_ids]) - vectors).max() <= 1e-5
        back = http.post("/detokenize", json={"tokens": tokens[0]["tokens"], "skip_special_tokens": True}).json()["data"]
        assert back == [{"index": 0, "text": "a horse carries the load."}]
