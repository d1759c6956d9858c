"""``packhorse slots``: starts as many workers and frontends as the settings ask for. supervisord runs it once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from packhorse.control import Supervisor
from packhorse_shared.arguments import Parser, add_settings, parse
from packhorse_shared.checks import check_files
from packhorse_shared.devices import VISIBLE, Devices, find_devices
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError, PackhorseError, SettingsError
from packhorse_shared.logs import configure_logs
from packhorse_shared.run_dir import ServerDevices, run_dir_of
from packhorse_shared.settings import MAX_PROCESSES, Settings

log = logging.getLogger(__name__)


def slots(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog="packhorse slots", description="Start the workers and frontends that the settings ask for.")
    add_settings(parser)
    _, settings = parse(parser, argv, environ)
    configure_logs(settings.process, "slots")
    try:
        url = environ.get("SUPERVISOR_SERVER_URL")
        if url is None:
            raise CannotStartError("packhorse slots is run by supervisord; start a server with packhorse embeddings")
        check_files(settings)
        run_dir = run_dir_of(settings.process, settings.http.port, environ.get("XDG_RUNTIME_DIR"))
        run_dir.prepare()
        supervisor = Supervisor(url)
        start_slots(supervisor, "frontend", settings.http.num_frontends)  # they answer from the start: a driver may take long
        devices = find_devices(settings.workers.devices, environ)
        workers = worker_count(settings, devices)
        run_dir.write_devices(ServerDevices(environ.get(VISIBLE), devices.words, devices.uuids))
        for remark in devices.remarks:
            log.log(logging.WARNING if remark.is_warning else logging.INFO, remark.text)
        start_slots(supervisor, "worker", workers)
    except PackhorseError as problem:
        log.error("%s", problem)  # noqa: TRY400 (one line; where it was raised tells a user nothing)
        return EXIT_CANNOT_START if isinstance(problem, SettingsError | CannotStartError) else 1
    return 0


def worker_count(settings: Settings, devices: Devices) -> int:
    """How many workers the settings mean. Raises SettingsError when there are more than slots."""
    each = settings.workers.workers_per_device
    count = len(devices.words) * each
    if count > MAX_PROCESSES:
        raise SettingsError(
            "workers_per_device", f"{each} on each of {len(devices.words)} devices make {count} workers, limit {MAX_PROCESSES}"
        )
    return count


def start_slots(supervisor: Supervisor, group: str, count: int) -> None:
    """Start the lowest slots of ``group`` (frontend, worker) that are not up yet. Raises PackhorseError."""
    processes = supervisor.processes()
    for name in (f"{group}-{index}" for index in range(count)):
        if not processes[name].is_up:
            supervisor.start(group, name)
