"""Whether tests that count in thousands or wait for minutes run at their full length.

Some faults show only after very many requests or a long time: memory that grows, a hang in one of a thousand patterns. Such
tests run in a short form of the same shape, and at full length with ``--soak`` (``make soak``).
"""

from __future__ import annotations

import pytest


def add_soak_option(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long tests at their full length (some take ten minutes)")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether to run at full length."""
    return bool(request.config.getoption("--soak"))
