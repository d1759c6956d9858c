"""``packhorse bench`` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stack import Stack

pytestmark = pytest.mark.process


def test_a_real_server_is_loaded_and_measured(minilm_stack: Stack, tmp_path: Path) -> None:
    """Closed loop, found by its run directory; the counts are the server's own."""
    run_dir = f"--run_dir={minilm_stack.run_dir}"
    before = sum(worker["inputs"] for worker in minilm_stack.status()["workers"])
    flags = ("--texts=mixed", "--inputs=2", "--requests=40", "--concurrency=4", "--warmup=0", "--encoding_format=base64")
    ended = minilm_stack.packhorse("bench", run_dir, *flags, "--json=-", f"--plot={tmp_path / 'x.png'}")
    assert ended.returncode == 0, ended.stderr
    (server,) = json.loads(ended.stdout)["servers"]
    total = server["total"]
    assert (server["model"], server["max_seq_len"]) == ("all-MiniLM-L6-v2", 256)
    assert (total["answered"], total["refused"], total["failed"]) == (40, 0, 0)
    assert total["tokens_per_s"] > 2 * total["inputs_per_s"] > 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert sum(worker["inputs"] for worker in minilm_stack.status()["workers"]) - before == 80


def test_an_open_loop_of_the_longest_texts_fits_into_the_model(minilm_stack: Stack) -> None:
    flags = ("--texts=long", "--rate=20", "--requests=10", "--warmup=0", "--json=-")
    ended = minilm_stack.packhorse("bench", minilm_stack.url, *flags)
    assert ended.returncode == 0, ended.stderr
    (server,) = json.loads(ended.stdout)["servers"]
    assert server["total"]["answered"] == 10
    assert server["client"]["late_p99_ms"] is not None
