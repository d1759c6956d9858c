"""``make gpu-check``: the tests that need a GPU, then ``gpu.py``, with the interpreter that runs this.

``python benchmarks/gpu_check.py [flags of gpu.py]``. Needs no installation of Packhorse (see ``gpu_environment.py``). The exit
status is 0 when both went well; 1 when there is no GPU, when a test failed or when a part of the benchmark did.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_environment import ROOT, prepare_environment

NEEDED = """
aiohttp httptools httpx huggingface_hub hypothesis msgspec numpy orjson prometheus_client psutil pynvml pytest pytest_timeout
rich safetensors sentence_transformers starlette supervisor tokenizers torch transformers uvicorn uvloop xdist yaml zmq
"""
PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
# Warnings of libraries of other versions than the pinned ones are no failure here; a file that cannot be imported is one.
TESTS = [*PYTEST, "-W", "default", "--continue-on-collection-errors", "-m", "gpu", "tests/gpu"]
BENCHMARK = [sys.executable, "benchmarks/gpu.py"]


def main() -> int:
    missing = [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"gpu-check: {sys.executable} lacks {', '.join(missing)}; it needs Packhorse's dependencies and those of its extra "
            "test (see pyproject.toml); nothing was run",
            file=sys.stderr,
        )
        return 1
    from packhorse_shared.devices import CPU, find_devices  # noqa: PLC0415 (needs some of them)

    if find_devices(("auto",), os.environ).words == (CPU,):
        print("gpu-check: this machine has no GPU that NVIDIA's driver tells of; nothing was run", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        prepare_environment(Path(folder))
        failed = [name for name, command in (("tests", TESTS), ("benchmark", [*BENCHMARK, *sys.argv[1:]])) if run(command)]
    print(f"gpu-check: {' and '.join(failed)} failed" if failed else "gpu-check: all went well", file=sys.stderr)
    return 1 if failed else 0


def run(command: list[str]) -> int:
    print(f"gpu-check: {' '.join(command)}", file=sys.stderr, flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
