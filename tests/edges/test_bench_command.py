"""``packhorse bench`` as a user runs it, against small servers in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edges.bench_server import BenchServer, bench_server, drop, hang, refusal
from packhorse import cli
from waiting import wait_until


def bench(*argv: str) -> int:
    return cli.main(["bench", *argv, "--warmup=0"])


def start(*argv: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "packhorse", "bench", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_the_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "packhorse bench [URL]" in capsys.readouterr().out


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server() as server:
        assert bench(server.url, "--requests=200", "--inputs=2") == 0
    out, err = capsys.readouterr()
    assert err == ""  # no bar: this is no terminal
    assert f"{server.url}, tiny" in out
    assert "embeddings, float, short texts (8 to 16 words), 2 inputs a request; closed loop of 16, 200 requests" in out
    for words in ("requests/s", "p99", "server: queue", "server: encode"):
        assert words in out


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank", "score", "classify"])
def test_every_endpoint(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server() as server:
        assert bench(server.url, "--requests=20", "--inputs=3", f"--endpoint={endpoint}", "--json=-") == 0
    assert set(server.paths) == {f"/v1/{endpoint}"}
    report = json.loads(capsys.readouterr().out)
    assert report["servers"][0]["total"]["answered"] == 20


def test_figures_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server() as server:
        assert bench(server.url, "--requests=50", "--texts=bulk", f"--json={tmp_path / 'x.json'}", "--api_key=geheim") == 0
        assert {headers.get("Authorization") for headers in server.headers} == {"Bearer geheim"}
    text = (tmp_path / "x.json").read_text()
    assert "geheim" not in text + capsys.readouterr().out
    (found,) = json.loads(text)["servers"]
    total = found["total"]
    assert (found["model"], found["max_seq_len"]) == ("tiny", 64)
    assert (total["answered"], total["refused"], total["failed"]) == (50, 0, 0)
    assert total["tokens_per_s"] == pytest.approx(320 * total["requests_per_s"])
    assert total["latency_ms"]["p50"] <= total["latency_ms"]["p99"] <= total["latency_ms"]["max"]
    assert total["server_ms"]["queue"]["mean"] == 1.5
    assert len(server.bodies[0]["input"]) == 32


def test_two_servers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    class Notes(list[str]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def append(self, path: str) -> None:
            order.append(self.name)
            super().append(path)

    with bench_server() as one, bench_server(models=[{"id": "other"}]) as two:
        one.paths, two.paths = Notes("A"), Notes("B")
        flags = ("--requests=30", "--rounds=3", "--concurrency=1", f"--plot={tmp_path / 'x.png'}", "--json=-")
        assert bench(one.url, "--against", two.url, *flags) == 0
    assert "".join(order) == ("A" * 10 + "B" * 10) * 3
    assert [body["input"] for body in one.bodies] == [body["input"] for body in two.bodies]
    assert {body["model"] for body in two.bodies} == {"other"}
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert {each["figure"] for each in report["ratios"]} >= {"requests/s", "latency p50", "latency p99"}
    assert {each["rounds"] for each in report["ratios"]} == {3}
    assert "A ÷ B" in err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_without_a_list_of_models_is_loaded_without_a_name() -> None:
    with bench_server() as server:
        server.models = None
        assert bench(server.url, "--requests=5") == 0
        assert "model" not in server.bodies[0]
        assert bench(server.url, "--requests=5", "--model=mine") == 0
        assert server.bodies[-1]["model"] == "mine"


def test_the_warm_up_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server() as server:
        assert cli.main(["bench", server.url, "--requests=10", "--warmup=0.1", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"][0]["total"]["answered"] == 10
    assert len(server.bodies) > 10


def test_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"input": ["a", "b"], "dimensions": 2}\n')
    with bench_server() as server:
        assert bench(server.url, "--requests=3", f"--texts={tmp_path / 'own.jsonl'}") == 0
        assert bench(server.url, "--requests=3", f"--texts={tmp_path / 'own.jsonl'}", "--inputs=2") == 1
    assert server.bodies[0] == {"model": "tiny", "input": ["a", "b"], "dimensions": 2}
    out, err = capsys.readouterr()
    assert "own.jsonl, whole requests; closed loop" in out
    assert "holds whole requests, which are sent as they are" in err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(429, "full"), "answered none of 2 requests: full"),
        (refusal(400, "no such thing"), "answered none of 2 requests: no such thing"),
        (drop, "did not answer rightly: connection lost (2); for example Server disconnected"),
        (hang, "did not answer rightly: no answer in time (2); for example"),
    ],
)
def test_a_run_that_failed_is_reported_and_ends_with_1(answer: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server(answer) as server:
        assert bench(server.url, "--requests=2", "--timeout=0.3") == 1
    out, err = capsys.readouterr()
    assert "requests/s" in out
    assert "milliseconds" not in out  # nothing was answered: there is no latency to show
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1: Connection refused"),
        ("unix:/no/such", "no server answers at unix:/no/such: No such file or directory"),
    ],
)
def test_no_server_is_one_line(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(url) == 1
    assert capsys.readouterr().err == f"packhorse bench: {words}\n"


def test_a_refused_key_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_self: BenchServer, _request: Any) -> Any:
        from aiohttp import web

        return web.Response(status=401)

    monkeypatch.setattr(BenchServer, "_models", refuse)
    with bench_server() as server:
        assert bench(server.url) == 1
    assert "refuses the API key (401); give one with PACKHORSE_API_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(("library", "flags"), [("aiohttp", []), ("matplotlib", ["--plot=x.png"])])
def test_a_missing_extra_is_one_line(
    library: str, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))
    assert bench("http://127.0.0.1:1", *flags) == 1
    assert capsys.readouterr().err == f"packhorse bench: {library} is not installed; pip install 'packhorse[bench]'\n"


def test_an_unwritable_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bench_server() as server:
        assert bench(server.url, "--requests=2", f"--json={tmp_path}") == 1
    assert capsys.readouterr().err == f"packhorse bench: cannot write {tmp_path}: Is a directory\n"


def test_ctrl_c_ends_early_and_reports() -> None:
    with bench_server() as server:
        process = start(server.url, "--duration=600", "--warmup=0", "--concurrency=2")
        wait_until(lambda: len(server.bodies) > 50, 60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "latency" in out
    assert "note: interrupted; the load lasted " in out
    assert err == ""


def test_ctrl_c_before_anything_was_measured() -> None:
    with bench_server(hang) as server:
        process = start(server.url, "--warmup=600", "--concurrency=2")
        wait_until(lambda: server.open == 2, 60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err == "packhorse bench: interrupted while warming up; nothing was measured\n"


def test_a_bar_on_a_terminal() -> None:
    screen, terminal = pty.openpty()
    with bench_server() as server:
        process = start(server.url, "--duration=1", "--warmup=0", stderr=terminal)
        out, _ = process.communicate(timeout=60)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(screen, 65536):
            shown += piece
    except OSError:
        pass  # the other end is closed
    os.close(screen)
    assert process.returncode == 0
    assert "round 1" in shown.decode()
    assert "requests/s" in shown.decode()
    assert "latency" in out
