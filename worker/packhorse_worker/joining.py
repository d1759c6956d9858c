"""How ``packhorse worker`` without a slot finds the server that it joins, and with which settings it does so."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from packhorse_shared.arguments import explicit, load_settings
from packhorse_shared.environment import from_environment
from packhorse_shared.errors import SettingsError
from packhorse_shared.key_folders import read_worker_keys
from packhorse_shared.run_dir import RunDir, find_running, run_dir_of
from packhorse_shared.settings import Settings, flags
from packhorse_shared.settings_query import query_settings
from packhorse_shared.triton import from_triton
from packhorse_shared.yaml_file import from_yaml
from packhorse_worker.loop import GIVE_UP_AFTER_S
from packhorse_worker.meeting import MeetingPoint, RemoteBroker

_RUN_DIR = ("PACKHORSE_RUN_DIR", "PACKHORSE_PORT")
"""All that a worker takes from the environment on its server's machine: the rest of it may be the server's own."""
_OF_THE_MACHINE = ("devices", "workers_per_device")
"""What the settings of a server on another machine cannot say about this one."""

_FROM_FILES = frozenset({*_OF_THE_MACHINE, "broker", "curve_keys", "run_dir"})
"""All that counts of the files of settings of a worker that joins a server on another machine."""


def join(
    parsed: argparse.Namespace, environ: Mapping[str, str], give_up_after_s: float = GIVE_UP_AFTER_S
) -> tuple[Settings, MeetingPoint]:
    """The settings of the running server with this worker's own put over them, and where to meet its broker.

    Raises PackhorseError with one line when there is no such server, or no folder with its model.
    """
    given = explicit(parsed)
    named_here = sorted({"run_dir", "port"} & given)
    if "broker" in given and named_here:
        raise SettingsError("--broker", f"--{named_here[0]} was given too; name one server")
    # PACKHORSE_PORT=tcp://... is from Kubernetes.
    here = {name: environ[name] for name in _RUN_DIR if "://" not in environ.get(name, "://")}
    if "broker" in given or ("PACKHORSE_BROKER" in environ and not (named_here or here)):
        return _join_remote(parsed, environ, give_up_after_s)
    return _join_here(parsed, here, environ.get("XDG_RUNTIME_DIR"))


def left_out(parsed: argparse.Namespace, environ: Mapping[str, str], joined: MeetingPoint) -> str:
    """What the files of settings of a worker that joined say in vain, in one line; "" where they say nothing so."""
    taken = explicit(parsed)
    if isinstance(joined, RemoteBroker):
        taken |= _FROM_FILES | from_environment(environ).keys()
    told = []
    for name, read in (("config", from_yaml), ("triton_config", from_triton)):
        file = getattr(parsed, name)
        names = [] if file is None else sorted(read(Path(file).expanduser()).keys() - taken)
        if names:
            told.append(f"{file} sets {', '.join(names)}")
    if not told:
        return ""
    return f"{'; '.join(told)}: a worker that joins takes them from its server; what differs here must be a flag"


def _join_here(parsed: argparse.Namespace, environ: Mapping[str, str], xdg_runtime_dir: str | None) -> tuple[Settings, RunDir]:
    own = load_settings(parsed, environ)
    given = explicit(parsed)
    named = bool({"run_dir", "port"} & given or environ)
    run_dir = run_dir_of(own.process, own.http.port, xdg_runtime_dir) if named else find_running(xdg_runtime_dir)
    if run_dir.path.exists():
        run_dir.prepare()  # settings are believed only where nobody else can have written them
    settings = _put_over(run_dir.read_settings(), own, given)
    _check_one_device(settings, given)
    return settings, run_dir


def _join_remote(
    parsed: argparse.Namespace, environ: Mapping[str, str], give_up_after_s: float
) -> tuple[Settings, RemoteBroker]:
    own = load_settings(parsed, environ)
    given = explicit(parsed) | (from_environment(environ).keys() & flags().keys())
    endpoint, keys_folder = own.process.broker, own.process.curve_keys
    assert endpoint is not None, "who calls this saw it"
    assert keys_folder is not None, "the settings were checked"
    if "*" in endpoint:
        raise SettingsError("broker", f"{endpoint} is where a server listens; give the address of its machine")
    broker = RemoteBroker(endpoint, read_worker_keys(Path(keys_folder).expanduser().absolute()))
    theirs = query_settings(endpoint, broker.curve_keys, give_up_after_s)
    settings = _put_over(theirs, own, given | _FROM_FILES)
    _check_one_device(settings, given)
    model = theirs.model.model
    if "model" not in given and model is not None and model.startswith("/") and not Path(model).is_dir():
        raise SettingsError(
            "model", f"the server serves {model}, a folder that is not on this machine; name its copy with --model"
        )
    return settings, broker


def _put_over(settings: Settings, own: Settings, names: Collection[str]) -> Settings:
    """The settings with those named taken from ``own``."""
    for name in names:
        section = flags()[name].section
        value = getattr(getattr(own, section), name)
        changed = msgspec.structs.replace(getattr(settings, section), **{name: value})
        settings = msgspec.structs.replace(settings, **{section: changed})
    return settings


def _check_one_device(settings: Settings, given: Collection[str]) -> None:
    if "devices" in given and len(settings.workers.devices) != 1:
        raise SettingsError("--devices", f"a worker runs on one device, not on {','.join(settings.workers.devices)}")
