"""The code of docs/python.md runs, block after block, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tiny_heads import build_cross_encoder

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "python.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PRINTED = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # the page shows what a CPU gives
    text = PAGE.read_text(encoding="utf-8")
    reranker = "cross-encoder/ms-marco-MiniLM-L6-v2"
    assert reranker in text
    text = text.replace(reranker, str(build_cross_encoder(tmp_path, "up to 5.3")))
    blocks = _BLOCK.findall(text)
    assert len(blocks) > 8
    capsys.readouterr()
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page is ours
    printed = capsys.readouterr().out.splitlines()
    promised = [line.partition(": ")[0] for block in blocks for line in _PRINTED.findall(block)]
    promised = [each for each in promised if not each.startswith("their cosine")]
    assert len(promised) > 8
    for each in promised:
        assert each in printed, f"the page says {each!r}"
