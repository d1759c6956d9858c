"""GET /metrics as the broker tells it: what was counted, and how things are now."""

from __future__ import annotations

from packhorse_broker import events as e
from packhorse_broker.frontends import oldest_arrival, worker_statuses
from packhorse_broker.ledger import Ledger
from packhorse_shared import __version__, metrics
from packhorse_shared.messages import MetricsReport, WorkerStatus
from packhorse_shared.meter import cell_of, cells_of

_QUEUE_INPUTS = cell_of(metrics.QUEUE_INPUTS)
_QUEUE_LIMIT = cell_of(metrics.QUEUE_LIMIT_INPUTS)
_QUEUE_OLDEST = cell_of(metrics.QUEUE_OLDEST_SECONDS)
_OPEN_REQUESTS = cell_of(metrics.OPEN_REQUESTS)
_IN_FLIGHT = cell_of(metrics.INPUTS_IN_FLIGHT)
_QUARANTINED = cell_of(metrics.QUARANTINED_INPUTS)
_WORKERS = cells_of(metrics.WORKERS)
_BUSY = cell_of(metrics.WORKERS_BUSY_RATIO)
_MEMORY = cell_of(metrics.WORKERS_MEMORY_BYTES)
_FRONTENDS = cell_of(metrics.FRONTENDS)
_UPTIME = cell_of(metrics.UPTIME_SECONDS)
_BUILD = cell_of(metrics.BUILD_INFO, __version__)
_WORKING = ("ready", "busy")


def metrics_asked(ledger: Ledger, event: e.MetricsAsked) -> None:
    """Somebody wants the numbers of GET /metrics."""
    values = ledger.meter.values.copy()
    oldest, statuses = oldest_arrival(ledger), worker_statuses(ledger)
    values[_QUEUE_INPUTS] = ledger.waiting_inputs()
    values[_QUEUE_LIMIT] = ledger.settings.batching.max_queue_size
    values[_QUEUE_OLDEST] = 0.0 if oldest is None else ledger.now - oldest
    values[_OPEN_REQUESTS] = ledger.live_requests
    values[_IN_FLIGHT] = sum(status.in_flight for status in statuses)
    values[_QUARANTINED] = len(ledger.quarantine)
    for status in statuses:
        values[_WORKERS[status.state]] += 1
    values[_BUSY] = _mean_busy(statuses)
    values[_MEMORY] = sum(status.memory_bytes for status in statuses)
    values[_FRONTENDS] = len(ledger.frontends)
    values[_UPTIME] = ledger.now - ledger.started_at
    values[_BUILD] = 1.0
    ledger.actions.append(e.TellFrontend(event.peer, MetricsReport(values)))


def _mean_busy(statuses: list[WorkerStatus]) -> float:
    working = [status.busy for status in statuses if status.state in _WORKING]
    return sum(working) / len(working) if working else 0.0
