"""Folders of CURVE keys: how ``packhorse keys`` makes them, and how they are read and checked.

A broker that takes workers of other machines has one, and each of those workers has one of its own:

    broker/  broker.key_secret  broker.key  allowed/NAME.key
    NAME/    worker.key_secret  broker.key

Who may join is whose public key is in ``allowed``. The files are those of pyzmq (``zmq.auth``).
"""

from __future__ import annotations

import re
import shutil
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from packhorse_shared.errors import PackhorseError, SettingsError

BROKER = "broker"
ALLOWED = "allowed"
_WORKER = "worker"
_SETTING = "curve_keys"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class BrokerKeys:
    """What the broker needs to take workers over tcp. Keys are Z85 texts of 40 characters."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: Path
    """The folder of those who may join."""


@dataclass(frozen=True)
class WorkerKeys:
    """What a worker needs to join over tcp."""

    public: bytes
    secret: bytes = field(repr=False)
    broker: bytes
    """The broker's public key: nobody else can answer for it."""
    folder: Path


def check_curve() -> None:
    """Raises SettingsError where libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise SettingsError(
            "broker", f"tcp:// needs CURVE, and this libzmq ({zmq.zmq_version()}) has none; install the pyzmq wheel"
        )


def read_broker_keys(folder: Path) -> BrokerKeys:
    """The broker's folder of keys, checked. Raises SettingsError with one line that says what is wrong with it."""
    check_curve()
    public, secret = _read_secret(folder, BROKER)
    allowed = folder / ALLOWED
    if not allowed.is_dir():
        raise SettingsError(_SETTING, f"there is no folder {allowed}; packhorse keys makes it")
    for each in (folder, allowed):
        if (mode := stat.S_IMODE(each.stat().st_mode)) & 0o022:
            raise SettingsError(_SETTING, f"{each} has mode {mode:04o}: others could add keys; chmod 700 it")
    return BrokerKeys(public, secret, allowed)


def read_worker_keys(folder: Path) -> WorkerKeys:
    """A worker's folder of keys, checked. Raises SettingsError with one line that says what is wrong with it."""
    check_curve()
    if (folder / f"{BROKER}.key_secret").exists():
        raise SettingsError(
            _SETTING, f"{folder} is the broker's own folder; give the one that packhorse keys made for this worker"
        )
    public, secret = _read_secret(folder, _WORKER)
    broker, _ = _read(folder / f"{BROKER}.key")
    return WorkerKeys(public, secret, broker, folder)


def load_key(path: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key in a file; the secret one is None where it holds none. Raises OSError, or ValueError when the file
    is none of keys."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open("rb"):  # zmq.auth does not tell a file that may not be read from one that is not there
        pass
    try:
        public, secret = load_certificate(path)
    except (ValueError, IndexError):  # the latter for a line without =
        public, secret = b"", None
    if not _is_key(public) or not (secret is None or _is_key(secret)):
        raise ValueError(f"{path} holds no CURVE key")
    return public, secret


def _read_secret(folder: Path, name: str) -> tuple[bytes, bytes]:
    if not folder.is_dir():
        raise SettingsError(_SETTING, f"there is no folder {folder}; packhorse keys makes it")
    path = folder / f"{name}.key_secret"
    public, secret = _read(path)
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        raise SettingsError(_SETTING, f"{path} has mode {mode:04o}: a secret key is for its owner alone; chmod 600 it")
    if secret is None or zmq.curve_public(secret) != public:
        raise SettingsError(_SETTING, f"{path} holds no secret key that belongs to its public key")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_key(path)
    except OSError as problem:
        raise SettingsError(_SETTING, f"cannot read {path}: {problem.strerror or problem}") from None
    except ValueError:
        raise SettingsError(_SETTING, f"{path} holds no CURVE key; packhorse keys makes such files") from None


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def is_name(text: str) -> bool:
    """Whether a worker's key may be called so."""
    return _NAME.fullmatch(text) is not None and text != BROKER


def make_keys(folder: Path, names: Sequence[str]) -> None:
    """Make the broker's folder in ``folder`` if it is missing, and one for each named worker, whose key is then allowed.

    Raises PackhorseError, before anything is made, for a name that is taken or cannot be one.
    """
    check_curve()
    broker = folder / BROKER
    for name in names:
        _check_name(folder, name)
    if len(set(names)) < len(names):
        raise PackhorseError("a NAME is given twice")
    try:
        _make_private(folder)
        _make_private(broker)
        _make_private(broker / ALLOWED)
        if not (broker / f"{BROKER}.key_secret").exists():
            _make_pair(broker, BROKER)
        read_broker_keys(broker)
        for name in names:
            _make_worker(folder, name)
    except OSError as problem:
        raise PackhorseError(f"cannot make keys: {problem.filename or folder}: {problem.strerror}") from None


def _check_name(folder: Path, name: str) -> None:
    if not is_name(name):
        raise PackhorseError(f"NAME {name[:80]!r} cannot be used; take up to 64 letters, digits, - and _, and not {BROKER}")
    for path in (folder / name, folder / BROKER / ALLOWED / f"{name}.key"):
        if path.exists():
            raise PackhorseError(f"{name} has a key already: {path} exists; take another NAME, or remove it first")


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        raise PackhorseError(f"{folder} has mode {mode:04o}; keys need a private folder: chmod 700 it, or name a new one")


def _make_worker(folder: Path, name: str) -> None:
    own = folder / name
    own.mkdir(mode=0o700)
    _make_pair(own, _WORKER)
    shutil.copyfile(folder / BROKER / f"{BROKER}.key", own / f"{BROKER}.key")
    # Last, so that no key is allowed whose folder is not complete.
    (own / f"{_WORKER}.key").replace(folder / BROKER / ALLOWED / f"{name}.key")


def _make_pair(folder: Path, name: str) -> None:
    """The folder is private already: nobody else sees the secret in the instant before its mode is set."""
    _, secret_file = create_certificates(folder, name)
    Path(secret_file).chmod(0o600)
