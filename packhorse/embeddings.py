"""``packhorse embeddings``: settings, checks, run directory, and then a server in the foreground."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from packhorse.conf import conf_path
from packhorse.supervise import SOCKET_NAME, Run, supervise
from packhorse.tail import Terminal
from packhorse_shared import __version__
from packhorse_shared.addresses import check_port_is_free, is_stale_socket
from packhorse_shared.arguments import PATH_SETTINGS, Parser, add_settings, load_settings, to_environment
from packhorse_shared.checks import check_files
from packhorse_shared.environment import without_ours
from packhorse_shared.errors import CannotStartError, ModelFilesError, SettingsError
from packhorse_shared.logs import configure_logs
from packhorse_shared.model_folder import find_folder, local_folder, served_names
from packhorse_shared.run_dir import RunDir, open_lock, run_dir_of
from packhorse_shared.settings import ModelSettings, Settings

_SUPERVISORD_FILES = 1024
_DESCRIPTION = """Serve a model behind one OpenAI-compatible endpoint on every device of this machine. MODEL is a Hugging Face
name or a local folder; without it, the small model of the `demo` extra is served. Every flag is also accepted with dashes,
and as the environment variable named beside it; a LIST is comma-separated, or its flag is
repeated. Precedence: flag, environment, --config, --triton_config, default."""


def embeddings(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line when the server cannot be started."""
    settings = _settings(argv, environ)
    run_dir = run_dir_of(settings.process, settings.http.port, environ.get("XDG_RUNTIME_DIR"))
    run_dir.prepare()
    lock = _lock(run_dir)
    try:
        _check_start(settings, run_dir)
        terminal = Terminal(sys.stderr.fileno())
        configure_logs(settings.process, "packhorse", terminal)
        greeting = f"packhorse {__version__} starts, model {served_names(settings.model)[0]}, run directory {run_dir.path}"
        run = Run(run_dir.path, conf_path(), _environment(settings, environ), settings.process.shutdown_grace)
        return supervise(run, terminal, greeting)
    finally:
        os.close(lock)


def _settings(argv: list[str], environ: Mapping[str, str]) -> Settings:
    parser = Parser(prog="packhorse embeddings", usage="%(prog)s [MODEL] [flags]", description=_DESCRIPTION)
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="what to serve; also --model")
    add_settings(parser)
    parsed = parser.parse_args(argv)
    if parsed.model_argument is not None:
        if parsed.model is not None:
            parser.error("--model: MODEL was given too; name one model")
        parsed.model = parsed.model_argument
    try:
        settings = with_absolute_paths(load_settings(parsed, environ))
        check_files(settings)
        to_environment(settings)
    except SettingsError as problem:
        parser.error(str(problem))
    return settings


def with_absolute_paths(settings: Settings) -> Settings:
    """The settings with every path absolute: the processes run in another folder."""
    sections: dict[str, msgspec.Struct] = {}
    for name in ("http", "process"):
        section = getattr(settings, name)
        paths = {each: getattr(section, each) for each in PATH_SETTINGS if hasattr(section, each)}
        given = {each: str(Path(path).expanduser().absolute()) for each, path in paths.items() if path is not None}
        sections[name] = msgspec.structs.replace(section, **given)
    model = settings.model.model
    if model is not None and Path(model).expanduser().is_dir():
        folder = str(Path(model).expanduser().absolute())
        sections["model"] = msgspec.structs.replace(settings.model, model=folder)
    return msgspec.structs.replace(settings, **sections)


def _environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What supervisord and so every process gets: the settings as resolved here, and our own commands first on PATH."""
    bin_folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([bin_folder, environ.get("PATH", os.defpath)])
    return without_ours(environ) | to_environment(settings) | {"PATH": path}


def _lock(run_dir: RunDir) -> int:
    """Be the only launcher of this run directory; the lock goes with the process."""
    descriptor = open_lock(run_dir.path / "launcher.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_taken = run_dir.is_live()
    except BlockingIOError:
        is_taken = True
    if is_taken:
        os.close(descriptor)
        raise CannotStartError(f"run_dir: another Packhorse runs in {run_dir.path}; choose another --port or --run_dir")
    return descriptor


def _check_start(settings: Settings, run_dir: RunDir) -> None:
    """What would make the parts fail, found before any of them starts."""
    _check_model(settings.model)
    _check_open_files()
    if settings.http.uds is not None:
        is_stale_socket(Path(settings.http.uds))
    else:
        check_port_is_free(settings.http)
    socket_path = run_dir.path / SOCKET_NAME
    if socket_path.exists() and not stat.S_ISSOCK(socket_path.lstat().st_mode):
        raise CannotStartError(f"run_dir: {socket_path} is in the way: it is not a socket, so it was not removed")


def _check_open_files() -> None:
    """supervisord wants so many, and says so in words that blame a setting of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _SUPERVISORD_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_SUPERVISORD_FILES, _SUPERVISORD_FILES))
    except (ValueError, OSError):
        needs = f"supervisord needs {_SUPERVISORD_FILES}"
        raise CannotStartError(f"open files: the limit is {hard} (ulimit -n), {needs}; raise it") from None


def _check_model(model: ModelSettings) -> None:
    """Whether a local folder, or the demo model, is there. A Hugging Face name is the workers' to fetch."""
    name = model.model
    is_local = name is None or name.startswith((".", "/", "~")) or name.count("/") > 1 or local_folder(name) is not None
    if is_local and not (find_folder(model, weights=True) / "config.json").is_file():
        raise ModelFilesError(f"model: {name} has no config.json; name the folder of a Hugging Face model")
