"""``make gpu-check`` and its benchmark where there is no GPU: tiny models on the CPU, every part, table and JSON."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse_shared.devices import find_devices
from stack import ROOT
from stub_gpus import NO_DRIVER, cards, driver_environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SYSTEMS = {"packhorse eager", "packhorse graphs", "sentence-transformers", "transformers"}
OPTIONAL = {"matplotlib", "opentelemetry"}
"""Imported by modules that are themselves imported only where a plot, or traces, are asked for."""
no_gpu = pytest.mark.skipif(find_devices(("auto",), os.environ).words != ("cpu",), reason="there is a GPU")


def run(out: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), f"--out={out}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=os.environ | environ)


def benchmark(out: Path, *flags: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    ended = run(out, "--quick", *flags, **environ)
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
    """A traceback after minutes of measuring, and no figures. Here the driver lists a card that torch does not find."""
    card = driver_environment(cards("GPU-a"))
    ended, report = benchmark(tmp_path, "--device=cuda", "--models", "minilm", "--only", "latency", **card)
    assert ended.returncode == 1
    failed = {each["part"] for each in report["problems"]}
    assert {"minilm: load packhorse eager", "minilm: load sentence-transformers", "minilm: peak of matrix products"} <= failed
    assert report["models"]["minilm"]["latency"] == []
    assert "FAILED: minilm: load packhorse eager: " in ended.stdout
    assert "- failed: minilm: load packhorse eager: " in (tmp_path / "gpu.md").read_text(encoding="utf-8")


NO_GPU = "--device {}: no GPU to use: no NVIDIA driver is installed; give --device cpu if that is meant"


WRONG_FLAGS = {
    "--device=tpu": "--device: 'tpu' is not allowed; give auto, cpu or cuda",
    "--device=cuda": NO_GPU.format("cuda"),
    "--quick": NO_GPU.format("auto"),
    "--budget_s=-1": "--budget_s: '-1' is not allowed; give seconds above 0",
    "--budget_s=0": "--budget_s: '0' is not allowed",
    "--budget_s=nan": "--budget_s: 'nan' is not allowed",
    "--budget_s=inf": "--budget_s: 'inf' is not allowed",
    "--budget_s=much": "--budget_s: 'much' is not allowed",
    "--rounds=0": "--rounds: '0' is not allowed; give a whole number from 1",
    "--rounds=-3": "--rounds: '-3' is not allowed",
    "--rounds=1.5": "--rounds: '1.5' is not allowed",
    "--models=gpt": "argument --models: invalid choice: 'gpt'",
}
READ = """
import sys; sys.path.insert(0, sys.argv.pop(1)); import gpu
flags = sys.argv[1:]
for flag in flags:
    sys.argv = ["gpu.py", flag]
    try:
        gpu.read_options()
    except SystemExit as ended:
        print(ended.code)
"""


def test_wrong_flags_are_one_line_each() -> None:
    """In one process: the libraries take longer than all of them."""
    command = [sys.executable, "-c", READ, str(ROOT / "benchmarks"), *WRONG_FLAGS]
    environ = os.environ | driver_environment({"error": NO_DRIVER})
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environ)
    assert ended.stdout.split() == ["2"] * len(WRONG_FLAGS)
    lines = ended.stderr.splitlines()
    assert len(lines) == len(WRONG_FLAGS)
    assert [words for words, line in zip(WRONG_FLAGS.values(), lines, strict=True) if words not in line] == []


@pytest.mark.parametrize("flags", [["--device=cuda"], []])
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "out"
    ended = run(out, *flags, **driver_environment({"error": NO_DRIVER}))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "give --device cpu if that is meant" in ended.stderr
    assert ended.stdout == ""
    assert not out.exists()


def test_wrong_words_of_the_environment_are_one_line(tmp_path: Path) -> None:
    ended = run(tmp_path, **driver_environment(cards("GPU-a")), CUDA_VISIBLE_DEVICES="all")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "--device auto: CUDA_VISIBLE_DEVICES: 'all' is no device" in line


def test_an_interpreter_without_the_modules_is_one_line() -> None:
    """Not a traceback, or one of each test file: -I -S has no module but Python's own."""
    script = str(ROOT / "benchmarks" / "gpu_check.py")
    code = f"import runpy, sys; sys.path[0] = {str(ROOT / 'benchmarks')!r}; runpy.run_path({script!r}, run_name='__main__')"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"gpu-check: {sys.executable} lacks ")
    assert "torch, " in line
    assert line.endswith("it needs Packhorse's dependencies and those of its extra test (see pyproject.toml); nothing was run")


def test_the_check_knows_every_module_that_it_needs() -> None:
    folders = [ROOT / each for each in ("packhorse", "frontend", "broker", "worker", "shared", "tests/gpu")]
    files = [*(ROOT / "benchmarks").glob("gpu*.py"), ROOT / "tests" / "conftest.py"]
    files += [path for folder in folders for path in folder.rglob("*.py")]
    found = {name for path in files for name in _imported(path)}
    known = ast.literal_eval(_value_of("NEEDED", ROOT / "benchmarks" / "gpu_check.py"))
    own = {path.stem for folder in ("tests", "tests/process/faults", "benchmarks") for path in (ROOT / folder).iterdir()}
    others = {name for name in found - own - sys.stdlib_module_names if not name.startswith("packhorse")}
    assert "torch" in others
    assert others - OPTIONAL <= set(known.split())


def _imported(path: Path) -> set[str]:
    """Names of the packages that a file imports when it is itself imported."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def _value_of(name: str, path: Path) -> ast.expr:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return next(node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)


@no_gpu
def test_without_a_gpu_the_check_says_so_in_one_line() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "gpu-check: this machine has no GPU that NVIDIA's driver tells of; nothing was run\n"
    assert ended.stdout == ""
