"""The page about metrics, the alert rules and the dashboard: made of what there is, and of all that somebody should see."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from packhorse_shared import metrics
from promql import find_faults, names_of

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus-alerts.yml").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
QUERIES = [query.replace("\\|", "|") for query in re.findall(r"^\|[^|]+\| `(.+)` \|$", PAGE.partition("## Questions")[2], re.M)]


def test_the_page_has_the_table_of_today() -> None:
    spec = importlib.util.spec_from_file_location("make_metrics", ROOT / "docs" / "make_metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == PAGE, "run python docs/make_metrics.py"


def test_the_page_names_every_metric() -> None:
    assert not [metric.name for metric in metrics.METRICS if f"| `{metric.name}` | {metric.kind} |" not in PAGE]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert find_faults(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert re.fullmatch(r"\d+m", rule.get("for", "1m"))


def test_alert_rules_are_a_file_as_prometheus_wants_it() -> None:
    assert ALERTS.keys() == {"groups"}
    assert [group.keys() for group in ALERTS["groups"]] == [{"name", "rules"}]
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_a_page_waits_for_what_heals_itself() -> None:
    """A worker that reloads, a broker that restarts, one scrape that fails: nobody is woken."""
    assert all("for" in rule or "increase(" in rule["expr"] for rule in RULES if rule["labels"]["severity"] == "page")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_there_is(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert find_faults(target["expr"]) == []
        assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
        assert 'job="$job",instance=~"$instance"' in target["expr"]
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert all(re.search(rf"by \([^)]*\b{label}\b", target["expr"]) for label in shown)
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD, "a number of the Grafana that it comes from"
    assert [(each["name"], each["type"]) for each in DASHBOARD["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("job", "query"),
        ("instance", "query"),
    ]
    assert max(Counter(panel["id"] for panel in DASHBOARD["panels"]).values()) == 1


def test_no_two_panels_lie_on_each_other() -> None:
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for one, other in itertools.combinations(boxes, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_the_dashboard_shows_every_metric() -> None:
    shown = set().union(*(names_of(target["expr"]) for panel in PANELS for target in panel["targets"]))
    # How many frontends there are is a setting; that one is missing shows nowhere else than in its log.
    assert {metric.name for metric in metrics.METRICS} - shown == {"packhorse_frontends"}


def test_the_queries_of_the_page_ask_for_what_there_is() -> None:
    assert len(QUERIES) >= 5
    assert [find_faults(query) for query in QUERIES] == [[]] * len(QUERIES)


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(packhorse_request_total[5m]))", "there is no packhorse_request_total"),
        ("rate(packhorse_batch_inputs[5m])", "there is no packhorse_batch_inputs"),
        ("packhorse_inputs_total", "packhorse_inputs_total is a counter, and nothing is applied to it"),
        ("rate(packhorse_queue_inputs[5m])", "packhorse_queue_inputs is a gauge, and rate is applied to it"),
        ('packhorse_workers{status="ready"}', "packhorse_workers has no label status"),
        ('packhorse_workers{state=~"ready|idle"}', "packhorse_workers has no state 'idle'"),
        ("sum by (endpoint) (packhorse_workers)", "nothing in ['packhorse_workers'] has a label endpoint"),
        ("sum(packhorse_workers", "no PromQL"),
    ],
)
def test_a_fault_would_be_found(expression: str, fault: str) -> None:
    found = find_faults(expression)
    assert found
    assert found[0].startswith(fault)
