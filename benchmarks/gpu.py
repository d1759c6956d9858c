"""How fast the engine is on a GPU, alone and behind HTTP: ``python benchmarks/gpu.py [--models minilm] [--only latency]``.

Each model runs in a process of its own through Packhorse, eager and with CUDA graphs, through sentence-transformers and through
transformers, all in bfloat16 on the same card in one run, in alternating rounds; then a whole server is loaded over HTTP with
one and several frontends and workers. Tables on the terminal; gpu.json with every run and gpu.md in the folder of ``--out``.
What fails is in both, and the rest goes on; the exit status is then 1. ``--device cpu --quick`` tries all of it on tiny ones.

The share of the peak: operations that the model needs for the texts' own tokens (linear layers and both products of attention),
per second, over what large bfloat16 matrix products of random values reach on the same card just before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_models
import gpu_served
from gpu_environment import prepare_environment
from gpu_report import SCHEMA, machine, markdown, show, verdicts
from rich.console import Console

from packhorse_shared.arguments import Parser
from packhorse_shared.devices import CPU, find_devices
from packhorse_shared.errors import SettingsError

DEVICES = ("auto", CPU, "cuda")
PARTS = ("throughput", "latency", "served")
NAMES = ("minilm", "bert-base", "bert-large", "qwen3-0.6b")
_HERE = Path(__file__).resolve().parent
_SHARES = {"minilm": 1.0, "bert-base": 1.0, "bert-large": 1.2, "qwen3-0.6b": 1.5, "served": 2.0}
"""How the time is shared; what one leaves is shared by those behind it."""
_GRACE_S = 120.0
"""What a model's process gets beyond its share, for its first round, before it is ended."""


def main() -> int:
    """Measure, show, write. The exit status is 1 when anything failed."""
    options = read_options()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        prepare_environment(Path(folder))
        report = {
            "schema": SCHEMA,
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(options.device),
            "options": {**vars(options), "out": str(options.out)},
            "models": {},
            "served": None,
            "problems": [],
        }
        for _ in Work(options, Path(folder), began + options.budget_s, report).parts():
            write(report, options.out, time.monotonic() - began)  # what ends this process takes no figures along
    write(report, options.out, time.monotonic() - began)
    show(report, Console(width=160))
    print(f"wrote {options.out / 'gpu.json'} and {options.out / 'gpu.md'} after {report['seconds']:.0f} s")
    return 1 if report["problems"] else 0


def write(report: dict[str, Any], out: Path, seconds: float) -> None:
    """The report so far, as JSON and as a page."""
    report |= {"verdicts": verdicts(report), "seconds": seconds}
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (out / "gpu.md").write_text(markdown(report), encoding="utf-8")


def read_options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (all)")
    parser.add_argument("--served_model", choices=NAMES, default="minilm", help="what the server serves (minilm)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (auto: cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny models, one round: to see that it runs")
    parser.add_argument("--rounds", type=_rounds, default=5, help="most alternating rounds (5)")
    parser.add_argument("--budget_s", type=_seconds, default=420, help="no round begins after so many seconds (420)")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if options.device not in DEVICES:
        parser.error(f"--device: {options.device[:64]!r} is not allowed; give auto, cpu or cuda")
    if options.device != CPU:
        if (problem := _why_no_gpu()) is not None:
            parser.error(f"--device {options.device}: {problem}")
        options.device = "cuda"
    return options


def _why_no_gpu() -> str | None:
    """None where there is one, as far as the driver tells."""
    try:
        found = find_devices(("auto",), os.environ)
    except SettingsError as problem:
        return str(problem)
    if found.words != (CPU,):
        return None
    why = found.remarks[-1].text.partition("the CPU: ")[2]
    return f"no GPU to use: {why}; give --device cpu if that is meant"


def _rounds(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 6 and int(word)):
        raise argparse.ArgumentTypeError(f"{word[:64]!r} is not allowed; give a whole number from 1")
    return int(word)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{word[:64]!r} is not allowed; give seconds above 0, such as 420")
    return seconds


class Work:
    """All parts, one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path, ends_at: float, report: dict[str, Any]) -> None:
        self._options = options
        self._folder = folder
        self._ends_at = ends_at
        self._report = report

    def parts(self) -> Iterator[str]:
        """Models, then the server; the report grows with each, whatever becomes of it."""
        parts = [each for each in self._options.models if {"throughput", "latency"} & set(self._options.only)]
        if "served" in self._options.only:
            parts.append("served")
        for number, part in enumerate(parts):
            share = _SHARES[part] / sum(_SHARES[each] for each in parts[number:])
            allowed = max(0.0, self._ends_at - time.monotonic()) * share
            try:
                if part == "served":
                    self._serve(allowed)
                else:
                    self._measure(part, allowed)
            except Exception as problem:
                self._failed(part, problem)
            yield part

    def _failed(self, part: str, problem: BaseException) -> None:
        said = f"{type(problem).__name__}: {problem}"[:3000]
        self._report["problems"].append({"part": part, "error": said})
        print(f"FAILED: {part}: {said}", file=sys.stderr, flush=True)

    def _measure(self, name: str, allowed: float) -> None:
        """One model, in a process of its own; its figures count even if it had to be ended."""
        result = self._folder / f"{name}.json"
        plan = {
            "model": name,
            "into": str(self._folder),
            "result": str(result),
            "device": self._options.device,
            "quick": self._options.quick,
            "until_s": allowed,
            "rounds": self._options.rounds,
            "only": self._options.only,
        }
        command = [sys.executable, str(_HERE / "gpu_measure.py"), json.dumps(plan)]
        try:
            status = subprocess.run(command, timeout=allowed + _GRACE_S, check=False).returncode
            if status:
                self._failed(name, RuntimeError(f"its process ended with {status}"))
        except subprocess.TimeoutExpired as problem:
            self._failed(name, problem)
        if result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
            self._report["problems"] += [{**each, "part": f"{name}: {each['part']}"} for each in found.pop("problems")]
            self._report["models"][name] = found

    def _serve(self, allowed: float) -> None:
        ends_at = time.monotonic() + allowed
        model = gpu_models.build(self._options.served_model, self._folder, tiny=self._options.quick)
        options = gpu_served.Options(
            device=self._options.device,
            quick=self._options.quick,
            ends_at=ends_at,
            rounds=self._options.rounds,
            generators=1 if self._options.quick else 4,
            slice_s=0.5 if self._options.quick else 2.0,
        )
        self._report["served"] = gpu_served.measure(model, self._folder, options, self._failed)


if __name__ == "__main__":
    sys.exit(main())
