"""``packhorse frontend``: one HTTP process, started by supervisord."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from packhorse_frontend.app import Frontend, FrontendPlan
from packhorse_frontend.connection.descriptors import fit_descriptors
from packhorse_frontend.connection.port import listen
from packhorse_frontend.connection.server import DrainingServer, uvicorn_config
from packhorse_frontend.layers.keys import load_keys
from packhorse_shared.addresses import url_of
from packhorse_shared.arguments import Parser, add_settings, parse
from packhorse_shared.cores import usable_cores
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError, SettingsError
from packhorse_shared.logs import configure_logs
from packhorse_shared.model_folder import find_folder, served_names
from packhorse_shared.run_dir import RunDir, run_dir_of
from packhorse_shared.settings import MAX_FRONTENDS, HttpSettings, Settings
from packhorse_shared.watchdog import Watchdog

if TYPE_CHECKING:
    from packhorse_frontend.layers.tracing import Tracing

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.001
"""A thread that reads a large body gives way to the event loop after so long; Python's own 5 ms add up over a request."""
_MOST_THREADS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a frontend until it is told to stop; returns the exit status: 0, or 3 when it cannot start."""
    parser = Parser(prog="packhorse frontend", description="HTTP: answers requests, tokenizes, and asks the broker.")
    parser.add_argument(
        "--index", type=int, default=0, metavar="N", choices=range(MAX_FRONTENDS), help="number of this frontend, from 0"
    )
    add_settings(parser)
    parsed, settings = parse(parser, sys.argv[1:] if arguments is None else arguments, os.environ)
    # The pool's threads are the parallelism: the tokenizer's own threads would come on top, one for each core of the host.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    configure_logs(settings.process, f"frontend-{parsed.index}")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    try:
        return int(uvloop.run(_serve(settings, parsed.index, os.environ)))
    except (CannotStartError, SettingsError) as problem:
        log.error(str(problem))  # noqa: TRY400 (the message says it all)
        return EXIT_CANNOT_START


async def _serve(settings: Settings, index: int, environ: Mapping[str, str]) -> int:
    http = settings.http
    if http.uds is not None and index > 0:
        raise CannotStartError("uds: a Unix socket is served by one frontend only (--num_frontends 1)")
    run_dir = run_dir_of(settings.process, http.port, environ.get("XDG_RUNTIME_DIR"))
    run_dir.prepare()
    plan = _plan(settings, run_dir, index)
    if http.otlp_traces_endpoint is not None:
        plan = replace(plan, tracing=_open_tracing(http.otlp_traces_endpoint, index))
    _check_certificate(http)
    http = fit_descriptors(http)
    sockets = listen(http, run_dir)
    watchdog = Watchdog()
    frontend = Frontend(plan, lambda: server.stop())  # noqa: PLW0108 (there is no server yet)
    server = DrainingServer(
        uvicorn_config(http, frontend.app, frontend.on_refusal),
        frontend,
        grace_s=settings.process.shutdown_grace,
        on_round=watchdog.feed,
    )
    log.debug("listening", extra={"url": plan.url, "threads": plan.threads})
    await server.serve(sockets=sockets)
    watchdog.rest()
    if plan.tracing is not None:
        await asyncio.to_thread(plan.tracing.close)
    if http.uds is not None:
        await asyncio.to_thread(Path(http.uds).unlink, missing_ok=True)
    if frontend.fault is not None:
        raise frontend.fault
    log.info("stopped")
    return 0


def _plan(settings: Settings, run_dir: RunDir, index: int) -> FrontendPlan:
    return FrontendPlan(
        http=settings.http,
        run_dir=run_dir,
        index=index,
        served_names=served_names(settings.model),
        keys=load_keys(settings.http),
        threads=max(1, min(_MOST_THREADS, usable_cores() // settings.http.num_frontends)),
        created=int(time.time()),
        url=url_of(settings.http),
        find_model=lambda: find_folder(settings.model, weights=False),
    )


def _open_tracing(endpoint: str, index: int) -> Tracing:
    """What sends traces to a collector. Raises SettingsError where the libraries for it are missing."""
    try:
        from packhorse_frontend.layers.tracing import Tracing, open_exporter  # noqa: PLC0415 (of an extra)
    except ModuleNotFoundError as problem:
        reason = f"needs OpenTelemetry ({problem.name} is missing): pip install 'packhorse[otel]'"
        raise SettingsError("otlp_traces_endpoint", reason) from None
    if not endpoint.startswith(("http://", "https://")):
        raise SettingsError("otlp_traces_endpoint", f"{endpoint} is not an http:// or https:// address")
    return Tracing(open_exporter(endpoint), index)


def _check_certificate(http: HttpSettings) -> None:
    """Whether HTTPS can be served with these files, before anything is opened."""
    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None:
            raise SettingsError("ssl_keyfile", "is set without ssl_certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(http.ssl_certfile, http.ssl_keyfile)
    except OSError as problem:
        raise SettingsError("ssl_certfile", f"{http.ssl_certfile} with its key cannot be used: {problem}") from None


if __name__ == "__main__":
    sys.exit(main())
