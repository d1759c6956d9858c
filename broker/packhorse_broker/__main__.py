"""``packhorse broker``: one process, started by supervisord."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from packhorse_broker.core import BrokerCore
from packhorse_broker.doors import RemoteWorkers
from packhorse_broker.loop import serve
from packhorse_broker.signals import stop_signals
from packhorse_shared.addresses import url_of
from packhorse_shared.arguments import Parser, add_settings, parse
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError, SettingsError
from packhorse_shared.key_folders import read_broker_keys
from packhorse_shared.logs import configure_logs
from packhorse_shared.model_folder import served_names
from packhorse_shared.run_dir import RunDir, RunningServer, run_dir_of
from packhorse_shared.settings import ProcessSettings, Settings, encode_settings

log = logging.getLogger(__name__)

_DESCRIPTORS = 1 << 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the broker until it is told to stop; returns the exit status."""
    parser = Parser(prog="packhorse broker", description="The queue: batches inputs and hands them to the workers.")
    add_settings(parser)
    _, settings = parse(parser, sys.argv[1:] if arguments is None else arguments, os.environ)
    configure_logs(settings.process, "broker")
    _raise_descriptor_limit()
    try:
        return _run(settings, os.environ)
    except (SettingsError, CannotStartError) as problem:
        log.error(str(problem))  # noqa: TRY400 (the message says it all)
        return EXIT_CANNOT_START


def _run(settings: Settings, environ: Mapping[str, str]) -> int:
    run_dir = run_dir_of(settings.process, settings.http.port, environ.get("XDG_RUNTIME_DIR"))
    remote_workers = _remote_workers(settings.process)
    token = _take_over(run_dir, settings, environ.get("SUPERVISOR_SERVER_URL"))
    boot_id = 1 + secrets.randbits(62)
    core = BrokerCore(settings, boot_id=boot_id, worker_token=token, now=time.monotonic())
    with stop_signals() as signals:
        return serve(core, run_dir, signals, encode_settings(_as_told(settings)), remote_workers)


def _raise_descriptor_limit() -> None:
    """Each connection takes a descriptor, those of strangers at the tcp port too until they are cut off, and ZeroMQ ends the
    process when none is left for one in the run directory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _remote_workers(process: ProcessSettings) -> RemoteWorkers | None:
    if process.broker is None or process.curve_keys is None:
        return None
    return RemoteWorkers(process.broker, read_broker_keys(Path(process.curve_keys).expanduser().absolute()))


def _as_told(settings: Settings) -> Settings:
    """The settings for workers of other machines, where a relative path or a name that comes from a folder means nothing."""
    model = settings.model
    folder = None if model.model is None else Path(model.model).expanduser()
    path = str(folder.absolute()) if folder is not None and folder.is_dir() else model.model
    told = msgspec.structs.replace(model, model=path, served_model_name=served_names(model))
    return msgspec.structs.replace(settings, model=told)


def _take_over(run_dir: RunDir, settings: Settings, supervisor_url: str | None) -> str:
    """Become the broker of the run directory, and leave there what others need; returns the workers' token.

    The lock is never released: it goes with the process.
    """
    run_dir.prepare()
    run_dir.lock()
    run_dir.clear_endpoints()
    token = run_dir.ensure_token()
    run_dir.write_settings(settings)
    run_dir.write_server(RunningServer(url=url_of(settings.http), supervisor_url=supervisor_url))
    return token


if __name__ == "__main__":
    sys.exit(main())
