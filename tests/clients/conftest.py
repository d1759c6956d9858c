"""The servers that others' clients are run against, and those clients, as `make clients` installs them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from stack import ROOT, Stack

CLIENTS = ROOT / ".clients"


@pytest.fixture(scope="session")
def reranker_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny cross-encoder. Only for reading."""
    from tiny_heads import build_cross_encoder

    return build_cross_encoder(tmp_path_factory.mktemp("models") / "cross-encoder", "new")


@pytest.fixture(scope="session")
def reranker_stack(reranker_model: Path) -> Iterator[Stack]:
    """A server of it under the name ``reranker``, shared by the tests that only read from it."""
    stack = Stack("--served_model_name=reranker", model=reranker_model)
    try:
        yield stack.start().wait_ready()
    finally:
        stack.clean()


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of `make clients`: ``python``, ``aiperf`` and ``node``. Skips the test where that was not run."""
    if not (CLIENTS / ".installed").exists():
        pytest.skip("the clients of others are not installed: make clients")
    return CLIENTS


@pytest.fixture
def client_environment(clients: Path, tmp_path: Path) -> Mapping[str, str]:
    """What a shell has in which these clients are on the PATH: a home of its own, and nothing that says anything of models."""
    tools = ":".join(str(clients / each / "bin") for each in ("python", "aiperf"))
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    return kept | {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "HAYSTACK_TELEMETRY_ENABLED": "False"}
