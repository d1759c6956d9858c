"""Folders of CURVE keys: made by ``packhorse keys``, checked at a start, and read again while the broker runs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate

from packhorse.cli import main
from packhorse_shared import curve
from packhorse_shared.curve import AllowList
from packhorse_shared.errors import PackhorseError, SettingsError
from packhorse_shared.key_folders import check_curve, make_keys, read_broker_keys, read_worker_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys for a broker and two machines."""
    make_keys(tmp_path / "keys", ["gpu1", "gpu2"])
    return tmp_path / "keys"


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def test_what_is_made(folder: Path) -> None:
    found = modes(folder)
    assert set(found) == {
        *(".", "broker", "broker/broker.key_secret", "broker/broker.key"),
        *("broker/allowed", "broker/allowed/gpu1.key", "broker/allowed/gpu2.key"),
        *("gpu1", "gpu1/worker.key_secret", "gpu1/broker.key", "gpu2", "gpu2/worker.key_secret", "gpu2/broker.key"),
    }
    assert {mode for name, mode in found.items() if (folder / name).is_dir()} == {0o700}
    assert {mode for name, mode in found.items() if name.endswith("_secret")} == {0o600}
    broker, first, second = read_broker_keys(folder / "broker"), *(read_worker_keys(folder / name) for name in ("gpu1", "gpu2"))
    assert first.broker == second.broker == broker.public
    assert len({broker.secret, first.secret, second.secret}) == 3
    for name, keys in (("gpu1", first), ("gpu2", second)):
        assert load_certificate(broker.allowed / f"{name}.key") == (keys.public, None)


def test_secrets_do_not_show(folder: Path) -> None:
    for keys in (read_broker_keys(folder / "broker"), read_worker_keys(folder / "gpu1")):
        assert keys.secret.decode() not in repr(keys)


def test_the_command_adds_machines_and_says_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["keys", str(folder), "gpu3", "attic_4-b"]) == 0
    told = capsys.readouterr().out
    assert f"--curve_keys {folder}/broker" in told
    assert f"{folder}/gpu3, {folder}/attic_4-b" in told
    assert len(told.splitlines()) <= 4
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in (folder / "broker" / "allowed").iterdir()) == [
        *("attic_4-b.key", "gpu1.key", "gpu2.key", "gpu3.key")
    ]


@pytest.mark.parametrize("name", ["gpu1", "broker", "", ".", "..", "a/b", "a b", "ä", "a.key", "x" * 65, "a\n"])
def test_a_name_that_cannot_be_used_makes_nothing(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = modes(folder)
    assert main(["keys", str(folder), "new", name]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("packhorse keys: ")
    assert modes(folder) == before


def test_a_name_is_taken_as_long_as_its_key_is_allowed(folder: Path) -> None:
    """Its folder is on another machine, and was removed here."""
    for path in (folder / "gpu1").iterdir():
        path.unlink()
    (folder / "gpu1").rmdir()
    with pytest.raises(PackhorseError, match=r"gpu1 has a key already: .*allowed/gpu1\.key exists"):
        make_keys(folder, ["gpu1"])
    (folder / "broker" / "allowed" / "gpu1.key").unlink()
    make_keys(folder, ["gpu1"])


def test_a_name_given_twice_and_a_folder_that_others_may_read(tmp_path: Path) -> None:
    with pytest.raises(PackhorseError, match="given twice"):
        make_keys(tmp_path / "k", ["a", "a"])
    assert not (tmp_path / "k").exists()
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PackhorseError, match="has mode 0755; keys need a private folder"):
        make_keys(tmp_path / "open", ["a"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(PackhorseError, match=r"cannot make keys: .*file"):
        make_keys(tmp_path / "file", ["a"])


@pytest.mark.parametrize(
    ("who", "spoil", "reason"),
    [
        ("broker", lambda each: each.rename(each.with_name("aside")), "there is no folder"),
        ("broker", lambda each: (each / "broker.key_secret").unlink(), "cannot read .*broker.key_secret: No such file"),
        ("broker", lambda each: (each / "broker.key_secret").chmod(0o640), r"mode 0640: a secret key is for its owner alone"),
        ("broker", lambda each: (each / "broker.key_secret").chmod(0o604), r"mode 0604: a secret key is for its owner alone"),
        ("broker", lambda each: (each / "broker.key_secret").write_text("x"), "holds no CURVE key"),
        ("broker", lambda each: (each / "broker.key_secret").write_text("public-key\n"), "holds no CURVE key"),
        ("broker", lambda each: (each / "broker.key_secret").write_text(f'public-key = "{"#" * 40}"\n'), "holds no CURVE key"),
        ("broker", lambda each: (each / "broker.key_secret").write_bytes(b"\xff\0\n" * 9), "holds no CURVE key"),
        ("broker", lambda each: (each / "broker.key_secret").write_bytes((each / "broker.key").read_bytes()), "no secret key"),
        ("broker", lambda each: (each / "allowed").rename(each / "aside"), "there is no folder .*allowed"),
        ("broker", lambda each: (each / "allowed").chmod(0o720), "allowed has mode 0720: others could add keys"),
        ("gpu1", lambda each: (each / "worker.key_secret").chmod(0o644), "mode 0644: a secret key is for its owner alone"),
        ("gpu1", lambda each: (each / "broker.key").unlink(), r"cannot read .*broker\.key: No such file"),
        ("gpu1", lambda each: (each / "broker.key").write_text(""), "holds no CURVE key"),
        ("gpu1", lambda each: os.mkfifo((each / "broker.key").rename(each / "aside").with_name("broker.key")), "no CURVE key"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_clear_line(folder: Path, who: str, spoil: object, reason: str) -> None:
    spoil(folder / who)  # type: ignore[operator]
    with pytest.raises(SettingsError, match=reason) as caught:
        (read_broker_keys if who == "broker" else read_worker_keys)(folder / who)
    assert str(caught.value).startswith("curve_keys: ")
    assert "\n" not in str(caught.value)


def test_a_secret_that_belongs_to_another_public_key(folder: Path) -> None:
    public, secret = zmq.curve_keypair()[0], read_broker_keys(folder / "broker").secret
    (folder / "broker" / "broker.key_secret").write_text(
        f'public-key = "{public.decode()}"\nsecret-key = "{secret.decode()}"\n'
    )
    with pytest.raises(SettingsError, match="holds no secret key that belongs to its public key"):
        read_broker_keys(folder / "broker")


def test_the_brokers_folder_is_not_a_workers(folder: Path) -> None:
    with pytest.raises(SettingsError, match="is the broker's own folder"):
        read_worker_keys(folder / "broker")
    with pytest.raises(SettingsError, match=r"broker\.key_secret"):
        read_broker_keys(folder / "gpu1")


def test_a_libzmq_without_curve_is_one_clear_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    for read in (check_curve, lambda: read_broker_keys(folder / "broker"), lambda: read_worker_keys(folder / "gpu1")):
        with pytest.raises(SettingsError, match=r"broker: tcp:// needs CURVE, and this libzmq .* has none"):
            read()


# ---- the allow-list ----


class Clock:
    """Takes the place of the time module in ``curve``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(curve, "time", made)
    return made


def test_the_allow_list_is_read_again_each_second(folder: Path, clock: Clock) -> None:
    keys, allowed = read_worker_keys(folder / "gpu1"), folder / "broker" / "allowed"
    allow_list = AllowList(allowed)
    assert allow_list.name_of(keys.public) == "gpu1"
    assert allow_list.name_of(zmq.curve_keypair()[0]) is None
    (allowed / "gpu1.key").unlink()
    assert allow_list.name_of(keys.public) == "gpu1"
    clock.now += 1.0
    assert allow_list.name_of(keys.public) is None
    make_keys(folder, ["gpu3"])
    clock.now += 1.0
    assert allow_list.name_of(read_worker_keys(folder / "gpu3").public) == "gpu3"
    (allowed / "gpu3.key").write_bytes((allowed / "gpu2.key").read_bytes())
    clock.now += 1.0
    assert allow_list.name_of(read_worker_keys(folder / "gpu3").public) is None


@pytest.mark.parametrize("name", [".key", "a b.key", "ä.key", b"\xff.key", "gpu9.txt", "gpu9.key_secret", "x" * 70 + ".key"])
def test_files_that_are_called_otherwise_allow_nothing(folder: Path, name: str | bytes) -> None:
    allowed = folder / "broker" / "allowed"
    public = read_worker_keys(folder / "gpu1").public
    (allowed / "gpu1.key").rename(allowed / os.fsdecode(name))
    assert AllowList(allowed).name_of(public) is None


@pytest.mark.parametrize("content", [b"", b"public-key", b'public-key = "short"', b"\xff\0"])
def test_a_broken_file_allows_nothing_and_is_told_of_once(
    folder: Path, clock: Clock, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    allow_list = AllowList(folder / "broker" / "allowed")
    public = read_worker_keys(folder / "gpu1").public
    assert allow_list.name_of(public) == "gpu1"
    (folder / "broker" / "allowed" / "gpu1.key").write_bytes(content)
    for _ in range(3):
        clock.now += 1.0
        assert allow_list.name_of(public) is None
    assert [record.getMessage() for record in caplog.records].count(f"{folder}/broker/allowed/gpu1.key holds no CURVE key") == 1


def test_a_disk_that_fails_takes_no_key_away(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a lack of file descriptors: a server must not lose its workers over it."""
    allow_list = AllowList(folder / "broker" / "allowed")
    public = read_worker_keys(folder / "gpu1").public
    assert allow_list.name_of(public) == "gpu1"

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for where, method in ((Path, "open"), (Path, "stat"), (os, "scandir")):
        (folder / "broker" / "allowed" / "gpu1.key").touch()
        with monkeypatch.context() as patch:
            patch.setattr(where, method, fail)
            clock.now += 1.0
            assert allow_list.name_of(public) == "gpu1"
    for path in (folder / "broker" / "allowed").iterdir():
        path.unlink()
    (folder / "broker" / "allowed").rmdir()
    clock.now += 1.0
    assert allow_list.name_of(public) is None
