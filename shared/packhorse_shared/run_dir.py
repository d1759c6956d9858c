"""The run directory: where the processes of one server meet.

A private folder (mode 0700, owner checked) that holds the two ZeroMQ endpoints of the broker, the lock that makes it the
only one, the token that workers show, and the settings that a worker started by hand takes over.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from packhorse_shared.devices import AUTO, checked_words
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.private_files import read_private, write_private
from packhorse_shared.settings import ProcessSettings, Settings, decode_settings, encode_settings

_LONGEST_SOCKET_PATH_BYTES = 107
"""Of sockaddr_un on Linux; ZeroMQ fails with an obscure error beyond."""
_LONGEST_SOCKET_NAME = "supervisor.sock.4194304"
"""supervisord binds its control socket under this name, its pid behind it, before it renames it."""
_PREFIX = "packhorse-"
_LOCK_PATIENCE_S = 0.5
_LOCK_RETRY_S = 0.01
"""Who only looks whether a broker lives (``is_live``) holds the lock for an instant; that must not stop a start."""


class RunningServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``server.json`` holds: how tools find the parts of a running server."""

    url: str
    """Where the frontends listen: http://host:port, https://host:port or unix:PATH."""
    supervisor_url: str | None
    """supervisord's control socket (unix://PATH), or None when the broker does not run under supervisord."""


class ServerDevices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``devices.json`` holds: which devices the server's settings meant when it started."""

    cuda_visible_devices: str | None
    """The variable under which that was so."""
    words: tuple[str, ...]
    uuids: tuple[str, ...] = ()
    """As in ``packhorse_shared.devices.Devices``."""


@dataclass(frozen=True)
class RunDir:
    """Paths and rules of one run directory. Constructing it touches nothing."""

    path: Path

    @property
    def frontends_endpoint(self) -> str:
        """ZeroMQ endpoint on which the broker serves frontends."""
        return f"ipc://{self.path / 'frontends.ipc'}"

    @property
    def workers_endpoint(self) -> str:
        """ZeroMQ endpoint on which the broker serves workers."""
        return f"ipc://{self.path / 'workers.ipc'}"

    @property
    def curve_keys(self) -> None:
        """Connections need none here: the folder is private."""

    @property
    def token_file(self) -> Path:
        """The secret that a worker shows to join."""
        return self.path / "worker.token"

    @property
    def settings_file(self) -> Path:
        """The server's settings, without secrets."""
        return self.path / "settings.json"

    @property
    def server_file(self) -> Path:
        """Where to find the server's parts; see ``RunningServer``."""
        return self.path / "server.json"

    @property
    def devices_file(self) -> Path:
        """Which devices the server runs on; see ``ServerDevices``."""
        return self.path / "devices.json"

    @property
    def lock_file(self) -> Path:
        """Held by the broker for its life."""
        return self.path / "broker.lock"

    def prepare(self) -> None:
        """Make the folder if it is missing. Raises CannotStartError when it is not ours, not private, or its path too long."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.lstat()
        except OSError as problem:
            raise CannotStartError(f"run_dir: cannot make {self.path}: {problem.strerror}") from None
        if not stat.S_ISDIR(found.st_mode):
            raise CannotStartError(f"run_dir: {self.path} is not a folder (a link is not followed)")
        if found.st_uid != os.geteuid():
            raise CannotStartError(f"run_dir: {self.path} belongs to user {found.st_uid}, not to user {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise CannotStartError(
                f"run_dir: {self.path} has mode {stat.S_IMODE(found.st_mode):04o}; it must be a private "
                "folder of its own with mode 0700; one that does not exist yet is made so"
            )
        longest = len(os.fsencode(self.path / _LONGEST_SOCKET_NAME))
        if longest > _LONGEST_SOCKET_PATH_BYTES:
            raise CannotStartError(
                f"run_dir: {self.path} is {longest - _LONGEST_SOCKET_PATH_BYTES} bytes too long for a Unix socket's path "
                f"(limit {_LONGEST_SOCKET_PATH_BYTES}); choose a shorter --run_dir"
            )

    def lock(self) -> int:
        """Become this directory's only broker; the lock goes with the process.

        Returns the file descriptor that holds it. Raises CannotStartError when another broker holds it. ZeroMQ itself
        would let a second bind steal the endpoint in silence.
        """
        descriptor = open_lock(self.lock_file)
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_LOCK_RETRY_S)
                    continue
                os.close(descriptor)
                raise CannotStartError(
                    f"run_dir: another Packhorse runs in {self.path}; choose another --port or --run_dir"
                ) from None
            return descriptor

    def is_live(self) -> bool:
        """Whether a broker holds the lock now."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def clear_endpoints(self) -> None:
        """Remove sockets that a dead broker left. Only for the holder of the lock. A file that is no socket is kept."""
        for endpoint in (self.frontends_endpoint, self.workers_endpoint):
            path = Path(endpoint.removeprefix("ipc://"))
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISSOCK(mode):
                raise CannotStartError(f"run_dir: {path} is in the way: it is not a socket, so it was not removed")
            path.unlink()

    def token(self) -> str:
        """The workers' token. Raises OSError while no broker has written one."""
        return self.token_file.read_text(encoding="ascii").strip()

    def ensure_token(self) -> str:
        """The workers' token, made on the first start: a broker that restarts keeps its workers."""
        try:
            token = self.token()
        except FileNotFoundError:
            token = ""
        if len(token) < 32:
            token = secrets.token_hex(32)
            self._write_private(self.token_file, token.encode("ascii"))
        return token

    def write_settings(self, settings: Settings) -> None:
        """Leave the settings for workers that join later."""
        self._write_private(self.settings_file, encode_settings(settings))

    def read_settings(self) -> Settings:
        """What ``write_settings`` left. Raises CannotStartError when there is nothing readable."""
        try:
            return decode_settings(self.settings_file)
        except (OSError, msgspec.DecodeError) as problem:
            raise self._unreadable(self.settings_file, problem) from None

    def write_devices(self, devices: ServerDevices) -> None:
        """Leave the devices of this server for its workers."""
        self._write_private(self.devices_file, msgspec.json.encode(devices))

    def read_devices(self) -> ServerDevices | None:
        """What ``write_devices`` left; None when there is nothing of the kind."""
        try:
            found = msgspec.json.decode(read_private(self.devices_file), type=ServerDevices)
            is_whole = len(found.uuids) in (0, len(found.words))
            is_usable = AUTO not in found.words and all(
                checked_words(each) == each for each in (found.words, found.uuids) if each
            )
        except (OSError, msgspec.DecodeError, SettingsError):
            return None
        return found if found.words and is_whole and is_usable else None

    def write_server(self, server: RunningServer) -> None:
        """Leave how to find the server's parts."""
        self._write_private(self.server_file, msgspec.json.encode(server))

    def read_server(self) -> RunningServer:
        """What ``write_server`` left. Raises CannotStartError when there is nothing readable."""
        try:
            return msgspec.json.decode(read_private(self.server_file), type=RunningServer)
        except (OSError, msgspec.DecodeError) as problem:
            raise self._unreadable(self.server_file, problem) from None

    def _unreadable(self, path: Path, problem: Exception) -> CannotStartError:
        if isinstance(problem, FileNotFoundError):
            return CannotStartError(f"no Packhorse runs in {self.path}")
        reason = problem.strerror if isinstance(problem, OSError) else problem
        return CannotStartError(f"run_dir: cannot read {path}: {reason}")

    @staticmethod
    def _write_private(path: Path, content: bytes) -> None:
        """As ``write_private``. Raises CannotStartError."""
        try:
            write_private(path, content)
        except OSError as problem:
            raise CannotStartError(f"run_dir: cannot write {path}: {problem.strerror}") from None


def open_lock(path: Path) -> int:
    """Open a file to be locked, made if it is missing. Raises CannotStartError when that cannot be done."""
    try:
        # O_NONBLOCK: a pipe of that name would hold us up for ever.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as problem:
        raise CannotStartError(f"run_dir: cannot open {path}: {problem.strerror}") from None


def run_dir_of(settings: ProcessSettings, port: int, xdg_runtime_dir: str | None) -> RunDir:
    """The run directory of these settings: ``run_dir``, else by port."""
    if settings.run_dir is not None:
        return RunDir(Path(settings.run_dir).expanduser().absolute())
    return RunDir(_default_parent(xdg_runtime_dir) / f"{_default_prefix(xdg_runtime_dir)}{port}")


def find_running(xdg_runtime_dir: str | None) -> RunDir:
    """The run directory of the one server that this user runs. Raises CannotStartError when there is none, or several."""
    parents = {(_default_parent(xdg), _default_prefix(xdg)) for xdg in (xdg_runtime_dir, None)}
    live = [
        RunDir(path)
        for parent, prefix in sorted(parents)
        for path in sorted(parent.glob(f"{prefix}*"))
        if _is_ours(path) and RunDir(path).is_live()
    ]
    if not live:
        raise CannotStartError("no running Packhorse found; name it with --port or --run_dir")
    if len(live) > 1:
        names = ", ".join(str(each.path) for each in live)
        raise CannotStartError(f"several Packhorse servers run ({names}); choose one with --port or --run_dir")
    return live[0]


def _is_ours(path: Path) -> bool:
    """Whether it is a folder of this user; it may vanish at any moment."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _default_parent(xdg_runtime_dir: str | None) -> Path:
    return Path(xdg_runtime_dir) if xdg_runtime_dir else Path("/tmp")  # noqa: S108 (the folder's owner and mode are checked)


def _default_prefix(xdg_runtime_dir: str | None) -> str:
    return _PREFIX if xdg_runtime_dir else f"{_PREFIX}{os.geteuid()}-"
