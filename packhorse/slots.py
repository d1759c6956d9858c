"""``packhorse slots``: starts as many workers and frontends as the settings ask for. supervisord runs it once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from packhorse.control import Supervisor
from packhorse_shared.arguments import Parser, add_settings, parse
from packhorse_shared.checks import check_files
from packhorse_shared.devices import device_words
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError, PackhorseError, SettingsError
from packhorse_shared.logs import configure_logs
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
        workers = worker_count(settings, environ.get("CUDA_VISIBLE_DEVICES"))
    except (SettingsError, CannotStartError) as problem:
        log.error("%s", problem)  # noqa: TRY400 (one line; where it was raised tells a user nothing)
        return EXIT_CANNOT_START
    try:
        start_slots(Supervisor(url), frontends=settings.http.num_frontends, workers=workers)
    except PackhorseError as problem:
        log.error("%s", problem)  # noqa: TRY400
        return 1
    return 0


def worker_count(settings: Settings, cuda_visible_devices: str | None) -> int:
    """How many workers the settings mean. Raises SettingsError when there are more than slots."""
    devices = len(device_words(settings.workers.devices, cuda_visible_devices))
    count = devices * settings.workers.workers_per_device
    if count > MAX_PROCESSES:
        raise SettingsError(
            "workers_per_device",
            f"{settings.workers.workers_per_device} on each of {devices} devices make {count} workers, limit {MAX_PROCESSES}",
        )
    return count


def start_slots(supervisor: Supervisor, *, frontends: int, workers: int) -> None:
    """Start the lowest slots of both kinds that are not up yet. Frontends come first: they answer from the start."""
    processes = supervisor.processes()
    for group, count in (("frontend", frontends), ("worker", workers)):
        for name in (f"{group}-{index}" for index in range(count)):
            if not processes[name].is_up:
                supervisor.start(group, name)
