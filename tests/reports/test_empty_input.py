"""Nothing to embed: an empty text among others is an input like any other as long as special tokens remain."""

from __future__ import annotations

import numpy as np
import pytest

from edges.test_http_embeddings import vectors
from reports.asking import ask
from stack import Stack

pytestmark = pytest.mark.process


def test_an_empty_text_among_others(stack: Stack) -> None:
    """One empty text fails its whole list, or shifts the vectors of those behind it."""
    answer = ask(stack, {"input": ["t10", "", "t11"]})
    found = vectors(answer)
    assert [item["index"] for item in answer.json()["data"]] == [0, 1, 2]
    assert answer.json()["usage"]["prompt_tokens"] == 3 + 2 + 3
    assert np.isfinite(found).all()
    for place, text in ((0, "t10"), (2, "t11")):
        assert np.abs(found[place] - vectors(ask(stack, {"input": text}))[0]).max() <= 1e-5
    empty = vectors(ask(stack, {"input": ""}))[0]
    assert np.abs(found[1] - empty).max() <= 1e-5
