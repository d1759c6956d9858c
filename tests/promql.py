"""Whether PromQL expressions ask only for what there is: metrics of the table, with their labels and values of these."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser as promql

from packhorse_shared import metrics

_TARGET_LABELS = {"job", "instance"}
"""What Prometheus puts on every series that it scrapes."""
_GRAFANA = {"$__rate_interval": "5m", "$job": "packhorse", "$instance": "here"}
_COUNTS = {"rate", "increase", "irate"}


def _series() -> dict[str, metrics.Metric]:
    """Every name that a series of the page has, and its metric."""
    found = {}
    for metric in metrics.METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + suffix: metric for suffix in suffixes}
    return found


SERIES = _series()


def find_faults(expression: str) -> list[str]:
    """What is wrong with an expression; empty when it is right."""
    for variable, value in _GRAFANA.items():
        expression = expression.replace(variable, value)
    try:
        parsed = promql.parse(expression)
    except ValueError as problem:
        return [f"no PromQL: {problem}"]
    return list(_faults(parsed, ""))


def names_of(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return {SERIES[name].name for name in re.findall(r"\bpackhorse_\w+", expression) if name in SERIES}


def _faults(node: promql.Expr, function: str) -> Iterator[str]:
    match node:
        case promql.VectorSelector():
            yield from _selector_faults(node, function)
        case promql.MatrixSelector():
            yield from _selector_faults(node.vector_selector, function)
        case promql.Call():
            for each in node.args:
                yield from _faults(each, node.func.name)
        case promql.AggregateExpr():
            yield from _faults(node.expr, "")
            labels = set(node.modifier.labels) if node.modifier is not None else set()
            yield from _unknown_labels(labels, node.expr)
        case promql.BinaryExpr():
            yield from _faults(node.lhs, "")
            yield from _faults(node.rhs, "")
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from _faults(node.expr, function)


def _selector_faults(selector: promql.VectorSelector, function: str) -> Iterator[str]:
    if selector.name == "up":
        return
    metric = SERIES.get(selector.name)
    if metric is None:
        yield f"there is no {selector.name}"
        return
    if (function in _COUNTS) != (metric.kind != "gauge"):
        yield f"{selector.name} is a {metric.kind}, and {function or 'nothing'} is applied to it"
    if selector.name.endswith("_bucket") and metric.kind == "histogram" and function not in _COUNTS:
        yield f"{selector.name} without a rate"
    for matcher in selector.matchers.matchers:
        if matcher.name in _TARGET_LABELS:
            continue
        if matcher.name not in metric.labels:
            yield f"{metric.name} has no label {matcher.name}"
            continue
        values = {each[metric.labels.index(matcher.name)] for each in metric.series}
        wanted = matcher.value.split("|")
        yield from (f"{metric.name} has no {matcher.name} {value!r}" for value in wanted if value not in values)


def _unknown_labels(labels: set[str], below: promql.Expr) -> Iterator[str]:
    """Labels that nothing below has."""
    names = set(re.findall(r"\bpackhorse_\w+|\bup\b", below.prettify()))
    known = set(_TARGET_LABELS)
    for name in names & SERIES.keys():
        known |= set(SERIES[name].labels) | ({"le"} if name.endswith("_bucket") else set())
    yield from (f"nothing in {sorted(names)} has a label {label}" for label in sorted(labels - known))
