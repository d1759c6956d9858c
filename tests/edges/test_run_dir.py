"""The run directory: private, ours, one broker at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from packhorse_shared.errors import CannotStartError
from packhorse_shared.run_dir import RunDir, RunningServer, find_running, run_dir_of
from packhorse_shared.settings import HttpSettings, ProcessSettings, Settings


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "r")
    made.prepare()
    return made


def test_it_is_made_private_and_again_is_fine(run_dir: RunDir) -> None:
    run_dir.prepare()
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("r").mkdir()
    tmp_path.joinpath("r").chmod(0o750)
    with pytest.raises(CannotStartError, match="has mode 0750; it must be a private folder"):
        RunDir(tmp_path / "r").prepare()


def test_a_folder_of_another_user_is_refused(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(CannotStartError, match="not to user 4711"):
        run_dir.prepare()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CannotStartError, match="a link is not followed"):
        RunDir(tmp_path / "link").prepare()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CannotStartError, match="cannot make"):
        RunDir(tmp_path / "file").prepare()
    with pytest.raises(CannotStartError, match="cannot make"):
        RunDir(tmp_path / "file" / "below").prepare()


@pytest.mark.parametrize(("size", "fits"), [(83, True), (84, False)])
def test_long_paths_are_refused_before_a_socket_is(tmp_path: Path, size: int, fits: bool) -> None:
    """107 bytes for the longest name in it, supervisor.sock and a pid of seven digits, and the slash."""
    path = Path("/tmp/ph-test" + "x" * (size - 12))
    try:
        if fits:
            RunDir(path).prepare()
        else:
            with pytest.raises(CannotStartError, match="1 bytes too long"):
                RunDir(path).prepare()
    finally:
        path.rmdir()


def test_one_broker_at_a_time(run_dir: RunDir) -> None:
    assert not run_dir.is_live()
    descriptor = run_dir.lock()
    assert run_dir.is_live()
    with pytest.raises(CannotStartError, match="another Packhorse runs"):
        run_dir.lock()
    os.close(descriptor)
    assert not run_dir.is_live()
    os.close(run_dir.lock())


def test_a_lock_file_that_is_a_link_is_refused(run_dir: RunDir) -> None:
    run_dir.lock_file.symlink_to("/dev/null")
    with pytest.raises(CannotStartError, match=r"cannot open .*broker\.lock: Too many levels of symbolic links"):
        run_dir.lock()
    assert not run_dir.is_live()


def test_stale_sockets_are_removed_and_other_files_kept(run_dir: RunDir) -> None:
    stale = run_dir.path / "frontends.ipc"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    run_dir.clear_endpoints()
    assert not stale.exists()
    kept = run_dir.path / "workers.ipc"
    kept.write_text("mine")
    with pytest.raises(CannotStartError, match="is in the way"):
        run_dir.clear_endpoints()
    assert kept.read_text() == "mine"


def test_the_token_outlives_a_broker(run_dir: RunDir) -> None:
    with pytest.raises(FileNotFoundError):
        run_dir.token()
    token = run_dir.ensure_token()
    assert len(token) == 64
    assert run_dir.ensure_token() == run_dir.token() == token
    assert stat.S_IMODE(run_dir.token_file.stat().st_mode) == 0o600
    run_dir.token_file.write_text("short")
    assert run_dir.ensure_token() != "short"


def test_settings_are_left_without_keys(run_dir: RunDir) -> None:
    with pytest.raises(CannotStartError, match="no Packhorse runs in"):
        run_dir.read_settings()
    settings = Settings(http=HttpSettings(port=9, api_key=("secret",)))
    run_dir.write_settings(settings)
    assert "secret" not in run_dir.settings_file.read_text()
    assert run_dir.read_settings() == settings.without_secrets()
    run_dir.settings_file.write_text("{")
    with pytest.raises(CannotStartError, match="cannot read"):
        run_dir.read_settings()


def test_server_file(run_dir: RunDir) -> None:
    with pytest.raises(CannotStartError, match="no Packhorse runs in"):
        run_dir.read_server()
    server = RunningServer(url="http://a:1", supervisor_url=None)
    run_dir.write_server(server)
    assert run_dir.read_server() == server


def test_where_it_is_by_default() -> None:
    assert run_dir_of(ProcessSettings(), 81, "/run/user/7").path == Path("/run/user/7/packhorse-81")
    assert run_dir_of(ProcessSettings(), 81, None).path == Path(f"/tmp/packhorse-{os.geteuid()}-81")
    assert run_dir_of(ProcessSettings(run_dir="/x/y"), 81, "/run").path == Path("/x/y")


def test_find_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse_shared.run_dir._default_prefix", lambda xdg: "packhorse-" if xdg else "no-such-")
    xdg = str(tmp_path)
    with pytest.raises(CannotStartError, match="no running Packhorse"):
        find_running(xdg)
    first = run_dir_of(ProcessSettings(), 1, xdg)
    first.prepare()
    first.lock()
    run_dir_of(ProcessSettings(), 3, xdg).prepare()
    assert find_running(xdg) == first
    second = run_dir_of(ProcessSettings(), 2, xdg)
    second.prepare()
    second.lock()
    with pytest.raises(CannotStartError, match=r"several.*packhorse-1.*packhorse-2"):
        find_running(xdg)


def test_a_lock_held_for_an_instant_does_not_stop_a_start(run_dir: RunDir) -> None:
    """That is what somebody who only looks (``is_live``) does."""
    looker = os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT)
    fcntl.flock(looker, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, [looker])
    timer.start()
    os.close(run_dir.lock())
    timer.join()


def test_a_folder_in_the_place_of_the_lock_file_is_one_clear_line(run_dir: RunDir) -> None:
    run_dir.lock_file.mkdir()
    with pytest.raises(CannotStartError, match=r"cannot open .*broker\.lock"):
        run_dir.lock()


def test_a_full_disk_is_one_clear_line(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(CannotStartError, match=r"cannot write .*settings\.json: No space left on device"):
        run_dir.write_settings(Settings())


def test_what_is_written_already_needs_no_room(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is killed while the disk is full comes back."""
    settings, server = Settings(), RunningServer(url="http://a:1", supervisor_url=None)
    token = run_dir.ensure_token()
    run_dir.write_settings(settings)
    run_dir.write_server(server)
    run_dir.path.chmod(0o500)
    monkeypatch.setattr(os, "fdopen", None)
    run_dir.write_settings(settings)
    run_dir.write_server(server)
    assert run_dir.ensure_token() == token
    run_dir.path.chmod(0o700)
