"""GET /metrics: what all processes have counted, in Prometheus' text format or OpenMetrics, as the scraper likes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import exposition
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from packhorse_frontend.state import FrontendState
from packhorse_shared import metrics as table
from packhorse_shared.meter import Reading, readings_of

_UNITS_IN_NAMES = ("seconds", "bytes", "ratio")


async def metrics(request: Request, state: FrontendState) -> Response:
    """The metrics of the whole server. Raises Problem (503) when the broker does not answer."""
    report = await state.ask_broker(state.client.metrics)
    body, content_type = render_metrics(report.values, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


def render_metrics(values: list[float], accept: str) -> tuple[bytes, str]:
    """The page and its content type. ``values``: all cells of ``meter.py``; ``accept``: the header of that name."""
    try:
        encode, content_type = exposition.choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is none
        encode, content_type = exposition.choose_encoder("")
    return encode(_Families(values)), content_type


class _Families(Collector):
    """The table with its numbers, as prometheus-client takes it."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """One family for each metric, in the order of the table."""
        for metric in table.METRICS:
            yield _family(metric, readings_of(metric, self._values))


def _family(metric: table.Metric, readings: Iterator[Reading]) -> Metric:
    unit = metric.unit if metric.unit in _UNITS_IN_NAMES else ""
    arguments = (metric.name, metric.help)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(*arguments, labels=metric.labels, unit=unit)
        bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
        for reading in readings:
            histogram.add_metric(reading.labels, list(zip(bounds, reading.counts, strict=True)), reading.value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(*arguments, labels=metric.labels, unit=unit)
    for reading in readings:
        family.add_metric(reading.labels, reading.value)
    return family
