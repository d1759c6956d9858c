"""A broker counts as gone after a second of silence, in which this process could have heard it."""

from __future__ import annotations

import threading
import time

import pytest

from edges.frontend_thread import running_frontend
from packhorse_frontend.hearing import SILENCE_S, Hearing
from packhorse_shared.messages import PING_INTERVAL_S


def looks(hearing: Hearing, times: list[float]) -> list[bool]:
    return [hearing.look(each) for each in times]


def test_silence_counts_from_the_last_word() -> None:
    hearing = Hearing()
    assert looks(hearing, [0.0, 0.25]) == [False, False], "not heard at all"
    hearing.hear(0.3)
    times = [0.5, 0.75, 1.0, 1.25, 0.3 + SILENCE_S, 1.31, 1.5]
    assert looks(hearing, times) == [True] * 5 + [False] * 2
    hearing.hear(1.6)
    assert hearing.look(1.6)


@pytest.mark.parametrize("stalled_s", [1.1, 3.0, 3600.0])
def test_time_in_which_we_did_not_run_is_no_silence(stalled_s: float) -> None:
    hearing = Hearing()
    hearing.hear(0.0)
    before = 0.7
    assert looks(hearing, [0.25, 0.5, before]) == [True] * 3
    awake = before + stalled_s
    assert hearing.look(awake), "nothing can have been read yet"
    counted = before + PING_INTERVAL_S
    left = SILENCE_S - counted
    assert hearing.look(awake + left - 0.01)
    assert not hearing.look(awake + left + 0.01), "and it did not speak since"


def test_a_broker_that_was_gone_before_stays_so() -> None:
    hearing = Hearing()
    hearing.hear(0.0)
    assert looks(hearing, [0.25, 0.5, 0.75, 1.0, 1.25]) == [True] * 4 + [False]
    assert not hearing.look(9.0)
    never = Hearing()
    assert looks(never, [0.0, 5.0]) == [False, False]


@pytest.mark.parametrize("turn_s", [0.6, 1.0, 5.0])
def test_an_event_loop_that_is_always_late_finds_out(turn_s: float) -> None:
    hearing = Hearing()
    hearing.look(0.0)
    hearing.hear(0.0)
    found = looks(hearing, [turn_s * turn for turn in range(1, 7)])
    assert found[0]
    assert not found[-1]


def test_a_frontend_that_did_not_run_still_takes_requests() -> None:
    with running_frontend() as bench:
        client = bench.frontend.state.client
        found: list[bool] = []
        done = threading.Event()

        def stall() -> None:
            time.sleep(1.5 * SILENCE_S)  # the fault: an event loop that is held up, and a broker with nothing to say meanwhile
            found.append(client.is_connected())
            done.set()

        bench.loop.call_soon_threadsafe(stall)
        assert done.wait(10)
        assert found == [True]
