"""The import rules of pyproject.toml hold, and a planted violation is seen: a rule that nothing can break guards nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "packhorse": ".",
    "packhorse_frontend": "frontend",
    "packhorse_broker": "broker",
    "packhorse_worker": "worker",
    "packhorse_shared": "shared",
}


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports over a tree, as `make check` runs it."""
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    paths = os.pathsep.join(str(tree / folder) for folder in SOURCES.values())
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache", "--config", str(tree / "pyproject.toml")],
        cwd=tree,
        env=dict(os.environ) | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, to plant violations in."""
    pytest.importorskip("importlinter", reason="import-linter comes with the dev extra")
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for package, folder in SOURCES.items():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder / package, copy / folder / package, ignore=ignore)
    return copy


def test_every_part_of_the_broker_is_pure_or_known_not_to_be() -> None:
    """A new file of the core must not be forgotten in the rule."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (set(rule["source_modules"]) for rule in rules if "core is pure" in rule["name"])
    found = {f"packhorse_broker.{path.stem}" for path in (ROOT / "broker" / "packhorse_broker").glob("*.py")}
    around = {f"packhorse_broker.{name}" for name in ("__init__", "__main__", "doors", "loop", "processes", "signals", "timer")}
    assert found == pure | around


def test_the_rules_hold(tree: Path) -> None:
    ended = lint(tree)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 broken" in ended.stdout


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("broker/packhorse_broker/core.py", "import time", "the broker's core is pure"),
        ("broker/packhorse_broker/core.py", "import packhorse_worker", "the three roles never import each other"),
        ("shared/packhorse_shared/errors.py", "import packhorse_broker", "imports run one way"),
        ("frontend/packhorse_frontend/__main__.py", "import torch", "torch and transformers only inside the worker"),
        ("packhorse/status.py", "import zmq", "sockets only in the loops"),
    ],
)
def test_a_planted_violation_is_seen(tree: Path, module: str, line: str, rule: str) -> None:
    path = tree / module
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n", 1))
    try:
        assert line in path.read_text(encoding="utf-8")
        ended = lint(tree)
    finally:
        path.write_text(text, encoding="utf-8")
    assert ended.returncode != 0
    broken = [each for each in ended.stdout.splitlines() if " BROKEN" in each]
    assert any(rule in each for each in broken), ended.stdout
