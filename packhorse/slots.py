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
        devices = find_devices(settings.workers.devices, environ)
        workers = worker_count(settings, devices)
        run_dir = run_dir_of(settings.process, settings.http.port, environ.get("XDG_RUNTIME_DIR"))
        run_dir.prepare()
        run_dir.write_devices(ServerDevices(environ.get(VISIBLE), devices.words))
    except (SettingsError, CannotStartError) as problem:
        log.error("%s", problem)  # noqa: TRY400 (one line; where it was raised tells a user nothing)
        return EXIT_CANNOT_START
    for remark in devices.remarks:
        log.log(logging.WARNING if remark.is_warning else logging.INFO, remark.text)
    try:
        start_slots(Supervisor(url), frontends=settings.http.num_frontends, workers=workers)
    except PackhorseError as problem:
        log.error("%s", problem)  # noqa: TRY400
        return 1
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


def start_slots(supervisor: Supervisor, *, frontends: int, workers: int) -> None:
    """Start the lowest slots of both kinds that are not up yet. Frontends come first: they answer from the start."""
    processes = supervisor.processes()
    for group, count in (("frontend", frontends), ("worker", workers)):
        for name in (f"{group}-{index}" for index in range(count)):
            if not processes[name].is_up:
                supervisor.start(group, name)
