"""``make gpu-check`` and its benchmark where there is no GPU: tiny models on the CPU, every part, table and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse_shared.devices import find_devices
from stack import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SYSTEMS = {"packhorse eager", "packhorse graphs", "sentence-transformers", "transformers"}
no_gpu = pytest.mark.skipif(find_devices(("auto",), os.environ).words != ("cpu",), reason="there is a GPU")


def benchmark(out: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--quick", f"--out={out}", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    return ended, json.loads((out / "gpu.json").read_text(encoding="utf-8"))


def test_every_part_is_measured_shown_and_written(tmp_path: Path) -> None:
    ended, report = benchmark(tmp_path, "--device=cpu", "--models", "qwen3-0.6b", "--served_model=minilm")
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert (report["schema"], report["problems"]) == (1, [])
    model = report["models"]["qwen3-0.6b"]
    assert set(model["start"]) == set(model["min_cosine"]) == SYSTEMS
    assert min(model["min_cosine"].values()) > 0.99
    shares = {(each["tokens"], each["source"], each["system"]): each["share_of_peak"] for each in model["throughput"]}
    assert {system for _, source, system in shares if source == "texts"} == SYSTEMS
    assert {system for _, source, system in shares if source == "ids"} == SYSTEMS - {"sentence-transformers"}
    assert len(shares) == 2 * 7
    assert min(shares.values()) > 0
    assert len(model["latency"]) == 2 * 7
    assert all(each["p99_ms"] >= each["p50_ms"] > 0 for each in model["latency"])
    # Two layers of query (64 x 128), key and value (64 x 64), output (128 x 64) and three of 64 x 128; half the attention.
    assert model["flops_per_token"]["40"] == 2 * 2 * 64 * (128 + 64 + 64 + 128 + 3 * 128) + 4 * 20 * 2 * 128
    loads = [(each["frontends"], each["workers"], each["tokens"]) for each in report["served"]["loads"]]
    assert sorted(loads) == [(1, 1, 10), (1, 1, 40), (2, 2, 10), (2, 2, 40)]
    assert all(each["texts_per_s"]["median"] > 0 for each in report["served"]["loads"])
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    for heading in ("Loading", "Throughput", "Latency of one text", "Through HTTP"):
        assert f"**{heading}" in page
    assert "through HTTP, one card" in ended.stdout


@no_gpu
def test_what_fails_is_reported_and_takes_nothing_else_along(tmp_path: Path) -> None:
    """A traceback after minutes of measuring, and no figures."""
    ended, report = benchmark(tmp_path, "--device=cuda", "--models", "minilm", "--only", "latency")
    assert ended.returncode == 1
    failed = {each["part"] for each in report["problems"]}
    assert {"minilm: load packhorse eager", "minilm: load sentence-transformers", "minilm: peak of matrix products"} <= failed
    assert report["models"]["minilm"]["latency"] == []
    assert "FAILED: minilm: load packhorse eager: " in ended.stdout
    assert "- failed: minilm: load packhorse eager: " in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@no_gpu
def test_without_a_gpu_the_check_says_so_in_one_line() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "gpu-check: this machine has no GPU that NVIDIA's driver tells of; nothing was run\n"
    assert ended.stdout == ""
