"""Models with a head of their own, over HTTP: their logits are the ones that transformers computes, one input at a time."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from conftest import StackFactory
from tiny_heads import build_head

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

INPUTS = [[2, *range(10, 10 + words), 3] for words in (3, 1, 40, 7, 12)]


def logits_of(folder: Path) -> list[np.ndarray]:
    import torch
    import transformers

    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits.flatten().numpy() for ids in INPUTS]


@pytest.mark.parametrize(
    ("name", "task", "dimension"), [("bert-token-reward", "token_reward", 2), ("roberta-classifier", "classify", 4)]
)
def test_logits_over_http(tmp_path: Path, make_stack: StackFactory, name: str, task: str, dimension: int) -> None:
    folder = build_head(tmp_path / "model", name)
    stack = make_stack(model=folder).start().wait_ready()
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        answer = http.post("/v1/embeddings", json={"input": INPUTS})
        assert answer.status_code == 200, answer.text
        found = [np.array(item["embedding"], dtype=np.float32) for item in answer.json()["data"]]
        status = http.get("/status").json()["model"]
        card = http.get("/v1/models").json()["data"][0]
    for values, expected in zip(found, logits_of(folder), strict=True):
        assert values.shape == expected.shape
        assert np.abs(values - expected).max() <= 1e-5
    assert (status["task"], status["dimension"]) == (card["task"], card["dimension"]) == (task, dimension)
