"""Figures that tests measure, and what they should be.

How quick something is on a machine that others use too says little, so a missed aim fails a test only with ``--aims`` (``make
faults``, alone on its machine). In both cases all figures are listed at the end of the run.
"""

from __future__ import annotations

import pytest

_PROPERTY = "aim"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--aims", action="store_true", help="fail tests whose figures miss their aims (for a machine of its own)")


class Aims:
    """The figures of one test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._test = request.node
        self._are_demanded = bool(request.config.getoption("--aims"))
        self._missed: list[str] = []

    def note(self, name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Record a figure with the aim that it should meet."""
        is_met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        aims = [f"{word} {limit:g}" for word, limit in (("<=", at_most), (">=", at_least)) if limit is not None]
        line = f"{name}: {value:.4g} {unit} (aim {' and '.join(aims) or 'none'}){'' if is_met else ' MISSED'}"
        self._test.user_properties.append((_PROPERTY, line))
        if not is_met:
            self._missed.append(line)

    def check(self) -> None:
        assert not (self._are_demanded and self._missed), "\n".join(self._missed)


@pytest.fixture
def aims(request: pytest.FixtureRequest) -> Aims:
    """Takes the test's figures with their aims."""
    found = Aims(request)
    yield found
    found.check()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report for found in terminalreporter.stats.values() for report in found if getattr(report, "when", "") == "teardown"
    ]
    lines = [(report.nodeid, text) for report in reports for name, text in report.user_properties if name == _PROPERTY]
    if not lines:
        return
    terminalreporter.section("figures and their aims")
    for nodeid, text in sorted(set(lines)):
        terminalreporter.write_line(f"{nodeid.rpartition('/')[2]}  {text}")
