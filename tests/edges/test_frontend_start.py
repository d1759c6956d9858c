"""What a frontend needs before it serves: its address, its keys, its settings."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from edges.fake_broker import running_broker
from edges.frontend_thread import save_tokenizer
from packhorse_frontend.connection import port
from packhorse_frontend.connection.descriptors import fit_descriptors, overflow_of
from packhorse_frontend.connection.port import listen, lock_address
from packhorse_frontend.layers.keys import Keys, load_keys
from packhorse_shared import addresses
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import HttpSettings
from waiting import wait_until


@pytest.fixture
def free() -> Iterator[HttpSettings]:
    """A free port. This process's share of its lock is given back afterwards: frontends keep theirs for life."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        found = HttpSettings(port=probe.getsockname()[1])
    yield found
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the folder is read
            if descriptor.readlink().name.endswith(f"-{found.port}.lock"):
                os.close(int(descriptor.name))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ph-") as name:
        yield Path(name)


def test_frontends_of_one_server_share_the_port(free: HttpSettings, tmp_path: Path) -> None:
    first, second = (listen(free, RunDir(tmp_path))[0] for _ in range(2))
    with first, second:
        assert first.getsockname() == second.getsockname()


def test_another_server_is_refused_by_name(free: HttpSettings, tmp_path: Path) -> None:
    with listen(free, RunDir(tmp_path / "one"))[0], pytest.raises(CannotStartError, match=str(tmp_path / "one")):
        listen(free, RunDir(tmp_path / "two"))


@pytest.mark.parametrize("shares", [False, True])
def test_another_program_is_noticed_though_it_shares_its_port(free: HttpSettings, tmp_path: Path, shares: bool) -> None:
    with socket.socket() as other:
        if shares:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((free.host, free.port))
        other.listen()
        with pytest.raises(
            CannotStartError, match=f"{free.port} on 127.0.0.1 is in use by another program; choose another --port"
        ):
            listen(free, RunDir(tmp_path))


def test_a_lock_that_a_dead_server_left_is_taken_over(free: HttpSettings, tmp_path: Path) -> None:
    lock = tmp_path / f"packhorse-{os.geteuid()}-127.0.0.1-{free.port}.lock"
    lock.write_text("/a/much/longer/run/directory/of/a/server/that/is/gone" * 3)
    assert lock_address(free, tmp_path / "new", tmp_path)
    assert lock.read_text() == str(tmp_path / "new")
    assert not lock_address(free, tmp_path / "new", tmp_path)


def test_frontends_that_start_at_the_same_moment_do_not_take_each_other_for_strangers(
    tmp_path: Path, free: HttpSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one looks whether the port is free; a second one of its server must not listen before it has looked."""
    run_dir = RunDir(tmp_path)
    sockets: list[socket.socket] = []
    second = threading.Thread(target=lambda: sockets.extend(listen(free, run_dir)), daemon=True)

    def check_late(http: HttpSettings) -> None:
        second.start()
        second.join(0.3)
        addresses.check_port_is_free(http)

    monkeypatch.setattr(port, "check_port_is_free", check_late)
    sockets += listen(free, run_dir)
    second.join(10)
    assert len(sockets) == 2
    for each in sockets:
        each.close()


def test_a_full_disk_is_no_hindrance_to_a_frontend_that_was_there_before(
    free: HttpSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lock's file should hold it holds already. For another server it cannot be written, which is one clear line."""
    opened: list[int] = []
    really_open, really_write = os.open, os.pwrite
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(really_open(*arguments)) or opened[-1])

    def be_first(run_dir: str) -> None:
        """Take the lock, and give it back as the end of a process does."""
        try:
            assert lock_address(free, Path(run_dir), tmp_path)
        finally:
            with contextlib.suppress(OSError):
                os.close(opened[-1])

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    be_first("/run/one")
    monkeypatch.setattr(os, "pwrite", fail)
    be_first("/run/one")
    with pytest.raises(CannotStartError, match=r"port: cannot write the lock file .*: No space left on device"):
        be_first("/run/two")
    monkeypatch.setattr(os, "pwrite", really_write)
    for name in ("/run/one", "/run/a/longer/one", "/run/two"):
        be_first(name)


def test_a_lock_file_is_no_link_and_private(free: HttpSettings, tmp_path: Path) -> None:
    lock = tmp_path / f"packhorse-{os.geteuid()}-127.0.0.1-{free.port}.lock"
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotStartError, match="lock file"):
        lock_address(free, tmp_path, tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    lock_address(free, tmp_path, tmp_path)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_host_that_is_nowhere(free: HttpSettings, tmp_path: Path) -> None:
    with pytest.raises(CannotStartError, match="host"):
        listen(HttpSettings(host="192.0.2.1", port=free.port), RunDir(tmp_path))


def test_a_unix_socket_is_private_and_replaces_a_dead_one(short: Path) -> None:
    path = short / "http.sock"
    http = HttpSettings(uds=str(path))
    for _ in range(2):
        with listen(http, RunDir(short))[0]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(CannotStartError, match="in use"):
                listen(http, RunDir(short))
    path.unlink()
    path.write_text("mine")
    with pytest.raises(CannotStartError, match="not a socket"):
        listen(http, RunDir(short))
    assert path.read_text() == "mine"


def test_keys_come_from_flags_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n  one  \n\ntwo\n")
    keys = load_keys(HttpSettings(api_key=("zero",), api_key_file=str(path)))
    assert [keys.accept(f"Bearer {key}".encode()) for key in ("zero", "one", "two", "three", "", "# ours")] == [True] * 3 + [
        False
    ] * 3
    assert not keys.accept(b"one")
    assert not Keys(())
    path.write_text("# nothing\n\n")
    with pytest.raises(SettingsError, match="holds no key"):
        load_keys(HttpSettings(api_key_file=str(path)))
    with pytest.raises(SettingsError, match="cannot read"):
        load_keys(HttpSettings(api_key_file=str(tmp_path / "none")))
    with pytest.raises(SettingsError, match="empty"):
        load_keys(HttpSettings(api_key=(" ",)))


@pytest.mark.parametrize(
    ("limits", "wanted", "connections", "soft"),
    [
        ((1024, 20_000), 4096, 4096, 4096 + 256 + 40),
        ((20_000, 20_000), 4096, 4096, 20_000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096, 4096, resource.RLIM_INFINITY),
        ((1024, 1024), 4096, 1024 - 40 - 123, 1024),
        ((1024, 1024), 500, 500, 1024),
        ((64, 64), 4096, 64 - 40 - 8, 64),
    ],
)
def test_connections_leave_room_for_the_files_of_the_process(
    limits: tuple[int, int], wanted: int, connections: int, soft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crowd of clients could keep a frontend from reading its tokenizer, or from finding its broker again."""
    found = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _what, new: found.append(new))
    fitted = fit_descriptors(HttpSettings(max_connections=wanted))
    assert fitted.max_connections == connections
    assert found[-1][0] == soft
    assert soft == resource.RLIM_INFINITY or connections + overflow_of(connections) + 40 <= soft


def test_too_few_open_files_for_any_connection_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (50, 50))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, _new: None)
    with pytest.raises(CannotStartError, match=r"the limit is 50 \(ulimit -n\), a frontend needs at least 56"):
        fit_descriptors(HttpSettings())


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "packhorse_frontend", f"--run_dir={folder}", f"--model={folder}", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_process_serves_without_torch_and_drains(free: HttpSettings, short: Path) -> None:
    url = f"http://127.0.0.1:{free.port}"

    def is_healthy() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    with running_broker(save_tokenizer(short)) as broker:
        process = start(short, f"--port={free.port}", "--served_model_name=tiny")
        try:
            wait_until(is_healthy, within_s=20)
            assert httpx.post(f"{url}/v1/embeddings", json={"input": "t10"}).json()["model"] == "tiny"
            assert psutil.Process(process.pid).memory_info().rss < 200e6
            assert not [each for each in psutil.Process(process.pid).memory_maps() if "torch" in each.path]
            second = start(short / "other", f"--port={free.port}", f"--model={short}")
            assert "is served by the Packhorse of" in second.communicate(timeout=20)[0]
            assert second.returncode == 3
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=20)[0]
            assert process.returncode == 0
        finally:
            process.kill()
        assert output.count(f"ready on {url} model=tiny dimension=32") == 1
        assert len(broker.hellos) == 1


def test_a_second_signal_ends_the_process_at_once(free: HttpSettings, short: Path) -> None:
    process = start(short, f"--port={free.port}", "--shutdown_grace=60")
    try:
        save_tokenizer(short)
        connection = wait_until(lambda: _connected(free.port), within_s=20)
        with connection:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n1")
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{free.port}/live").status_code == 200)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{free.port}/v1/models").status_code == 503)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=10) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()


def _connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=10)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api_key_file=/nowhere"], "api_key_file"),
        (["--ssl_certfile=/nowhere", "--ssl_keyfile=/nowhere"], "ssl_"),
        (["--uds=/nowhere/http.sock"], "uds"),
    ],
)
def test_settings_that_cannot_be_used_end_the_process_with_one_line(short: Path, flags: list[str], words: str) -> None:
    process = start(short, *flags)
    output = process.communicate(timeout=20)[0]
    assert process.returncode in (2, 3)
    assert len(output.splitlines()) == 1
    assert words in output


def test_a_model_without_tokenizer_ends_the_process_naming_the_file(free: HttpSettings, short: Path) -> None:
    process = start(short, f"--port={free.port}")
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 3
    assert f"{short}/tokenizer.json is missing" in output


@pytest.mark.parametrize("way", ["tls", "uds"])
def test_it_serves_over_tls_and_over_a_unix_socket(free: HttpSettings, short: Path, way: str) -> None:
    if way == "tls":
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
        files = ["-keyout", str(short / "key.pem"), "-out", str(short / "cert.pem")]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        flags = [f"--port={free.port}", f"--ssl_keyfile={short}/key.pem", f"--ssl_certfile={short}/cert.pem"]
        context = ssl.create_default_context(cafile=str(short / "cert.pem"))
        client = httpx.Client(base_url=f"https://127.0.0.1:{free.port}", verify=context)
    else:
        flags = [f"--uds={short}/http.sock"]
        client = httpx.Client(base_url="http://x", transport=httpx.HTTPTransport(uds=f"{short}/http.sock"))

    def is_listening() -> bool:
        with socket.socket(socket.AF_INET if way == "tls" else socket.AF_UNIX) as probe:
            return probe.connect_ex(("127.0.0.1", free.port) if way == "tls" else f"{short}/http.sock") == 0

    with running_broker(save_tokenizer(short)), client:
        process = start(short, "--max_body_bytes=100000", *flags)
        try:
            wait_until(is_listening, within_s=20)
            wait_until(lambda: client.get("/health").status_code == 200)
            assert client.post("/v1/embeddings", json={"input": "t10"}).status_code == 200
            assert client.post("/v1/embeddings", content=b" " * 3_000_000).status_code == 413
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
            assert process.returncode == 0
            assert not (short / "http.sock").exists()
        finally:
            process.kill()
