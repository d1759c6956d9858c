"""Every snippet of docs/clients.md, run as it stands there, but for the addresses of the servers and the folder of the model.

A snippet prints what its comments say, and makes the vectors that the server gives for the same texts. Locust is told besides
to print its report as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stack import ROOT, Stack

pytestmark = pytest.mark.process

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
SERVERS = {"http://127.0.0.1:8000": "minilm_stack", "http://127.0.0.1:8001": "reranker_stack"}
"""The fixture behind each address of the page."""
TEXTS = ["A horse carries the load.", "Ein Pferd trägt die Last."]
WITHIN_S = 90
# What is appended to a snippet that makes vectors, so that the test sees them.
TELL_VECTORS = {
    "python": "import json\nprint(json.dumps([list(map(float, vector)) for vector in vectors]))\n",
    "js": "console.log(JSON.stringify(vectors));\n",
}


@dataclass(frozen=True)
class Snippet:
    """One fenced block of the page."""

    title: str
    language: str
    code: str

    def expected(self) -> list[str]:
        """The comments behind ``print`` and ``console.log``."""
        return re.findall(r"(?:print|console\.log)\(.*\);?  ?(?:#|//) (.*)$", self.code, re.MULTILINE)


def _snippets() -> list[Snippet]:
    found, title = [], ""
    for heading, language, code in re.findall(r"^## ([^\n]*)$|^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        title = heading or title
        if language:
            found.append(Snippet(title, language, code))
    return found


SNIPPETS = _snippets()
PROGRAMS = [each for each in SNIPPETS if each.language in TELL_VECTORS and each.title != "Load tools"]
CURLS = [each for each in SNIPPETS if each.title == "curl"]


def _named(snippets: list[Snippet]) -> list[str]:
    return [f"{each.title}-{number}" for number, each in enumerate(snippets)]


def test_the_page_has_a_snippet_for_every_client() -> None:
    titles = {each.title for each in SNIPPETS}
    assert titles >= {"OpenAI, Python", "OpenAI, JavaScript", "LangChain", "LlamaIndex", "Haystack", "Cohere", "Load tools"}
    assert all(each.expected() for each in PROGRAMS)


@pytest.mark.parametrize("snippet", PROGRAMS, ids=_named(PROGRAMS))
def test_program(
    snippet: Snippet, clients: Path, client_environment: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    makes_vectors = re.search(r"^(const )?vectors = ", snippet.code, re.MULTILINE) is not None
    code = _with_servers(snippet.code, request)
    code += TELL_VECTORS[snippet.language] if makes_vectors else ""
    # Node finds packages from the folder in which it is started, Python from its own.
    python = ["python", "-c", code]
    command = python if snippet.language == "python" else ["node", "--input-type=module", "-e", code]
    lines = _run(command, clients / "node", client_environment).splitlines()
    assert lines[: len(snippet.expected())] == snippet.expected()
    if makes_vectors:
        minilm_stack: Stack = request.getfixturevalue("minilm_stack")
        with minilm_stack.client() as client:
            direct = [item.embedding for item in client.embeddings.create(model="all-MiniLM-L6-v2", input=TEXTS).data]
        np.testing.assert_allclose(json.loads(lines[-1]), direct, atol=1e-6)


@pytest.mark.parametrize("snippet", CURLS, ids=_named(CURLS))
def test_curl(snippet: Snippet, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = _with_servers(snippet.code, request)
    answer = json.loads(_run(["bash", "-ec", code], tmp_path, None))
    assert len(answer["data" if "/v1/embeddings" in code else "results"]) == (2 if "/v1/embeddings" in code else 1)


def test_aiperf(
    minilm_folder: Path, tmp_path: Path, client_environment: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    code = _load_tool("aiperf profile", request).replace("/models/all-MiniLM-L6-v2", str(minilm_folder))
    _run(["bash", "-ec", code], tmp_path, client_environment)
    (export,) = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    report = json.loads(export.read_text(encoding="utf-8"))
    assert report["request_count"]["avg"] == 50
    assert report.get("error_request_count") is None
    assert report["input_sequence_length"]["avg"] == pytest.approx(64, abs=4)


def test_locust(tmp_path: Path, client_environment: Mapping[str, str], request: pytest.FixtureRequest) -> None:
    (program,) = (each for each in SNIPPETS if each.title == "Load tools" and each.language == "python")
    (tmp_path / "locustfile.py").write_text(program.code, encoding="utf-8")
    code = _load_tool("locust", request)
    (totals,) = json.loads(_run(["bash", "-ec", f"{code.strip()} --json --skip-log"], tmp_path, client_environment))
    assert totals["num_requests"] > 0
    assert totals["num_failures"] == 0


def _load_tool(start: str, request: pytest.FixtureRequest) -> str:
    (snippet,) = (each for each in SNIPPETS if each.language == "sh" and each.code.startswith(start))
    return _with_servers(snippet.code, request)


def _with_servers(code: str, request: pytest.FixtureRequest) -> str:
    """The code with the addresses of running servers."""
    for address, fixture in SERVERS.items():
        if address in code:
            stack: Stack = request.getfixturevalue(fixture)
            code = code.replace(address, stack.url)
    return code


def _run(command: list[str], folder: Path, environment: Mapping[str, str] | None) -> str:
    """What the command prints. Fails with what it says when it fails."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, complaints = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        printed, complaints = process.communicate()
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{printed}\n{complaints}"
    return printed
