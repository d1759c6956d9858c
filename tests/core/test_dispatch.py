"""When a batch leaves: the three rules, the two credits, the auto delay."""

from __future__ import annotations

import pytest

from broker_story import Story, hello, submit, submit_many
from packhorse_shared.messages import EncodeOptions, WorkerLimits


def test_rule_1_a_full_batch_leaves_at_once() -> None:
    story = Story(max_batch_size=3, max_queue_delay=60.0).with_frontend().with_workers("w0")
    assert story.submit(1) == []
    assert story.submit(2) == []
    assert story.submit(3) == ["batch 1 -> w0: 1.0 2.0 3.0"]


def test_rule_2_the_next_input_would_go_over_the_token_limit() -> None:
    story = Story(max_num_tokens=10, max_queue_delay=60.0).with_frontend().with_workers("w0")
    assert story.submit(1, [6]) == []
    assert story.submit(2, [5]) == ["batch 1 -> w0: 1.0"]


def test_rule_2_a_batch_of_exactly_the_limit_is_full() -> None:
    story = Story(max_num_tokens=10, max_queue_delay=60.0).with_frontend().with_workers("w0")
    assert story.submit(1, [6]) == []
    assert story.submit(2, [4]) == ["batch 1 -> w0: 1.0 2.0"]


@pytest.mark.parametrize("delay_s", [0.0001, 0.005, 1.5])
def test_rule_3_the_oldest_input_has_waited_the_delay(delay_s: float) -> None:
    story = Story(max_queue_delay=delay_s).with_frontend().with_workers("w0")
    assert story.submit(1) == []
    assert story.core.next_deadline() == pytest.approx(100.0 + min(delay_s, 1.0))
    assert story.wait_alive(delay_s / 2, "w0") == []
    assert story.feed(submit(2)) == []
    assert story.wait_alive(delay_s / 2 * 1.01, "w0") == ["batch 1 -> w0: 1.0 2.0"]


def test_zero_delay_leaves_at_once() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]


def test_the_delay_is_not_waited_twice_for_a_busy_worker_and_the_batch_grows_meanwhile() -> None:
    story = Story(max_queue_delay=0.1).with_frontend().with_workers("w0")
    story.submit(1)
    assert story.wait(0.1) == ["batch 1 -> w0: 1.0"]
    assert story.submit(2) == []
    assert story.wait(0.2) == []
    assert story.submit(3) == []
    assert story.done("w0", 1) == ["result -> f0: 1.0", "batch 2 -> w0: 2.0 3.0"]


def test_a_worker_that_gets_free_before_the_delay_is_over_waits_for_it() -> None:
    story = Story(max_queue_delay=0.1).with_frontend().with_workers("w0")
    story.submit(1)
    story.wait(0.1)
    assert story.submit(2) == []
    assert story.done("w0", 1) == ["result -> f0: 1.0"]
    assert story.wait(0.09) == []
    assert story.wait(0.011) == ["batch 2 -> w0: 2.0"]


def test_inputs_of_one_request_ride_different_batches_on_different_workers() -> None:
    story = Story(max_batch_size=2, max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    lines = story.submit(1, [1, 2, 3])
    assert lines == ["batch 1 -> w0: 1.0 1.1", "batch 2 -> w1: 1.2"]
    assert story.done("w1", 2) == ["result -> f0: 1.2"]
    assert story.done("w0", 1) == ["result -> f0: 1.0 1.1"]
    assert story.report().rates.requests_per_s == 1


def test_idle_workers_take_turns() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1", "w2")
    takers = []
    for rid in range(6):
        (line,) = story.submit(rid)
        takers.append(line.split()[3])
        story.done(takers[-1][:-1], rid + 1)
    assert takers == ["w0:", "w1:", "w2:"] * 2


def test_the_second_credit_takes_a_full_batch_and_there_is_no_third() -> None:
    story = Story(max_batch_size=2, max_queue_delay=0.0).with_frontend().with_workers("w0")
    assert story.submit(1, [1] * 7) == ["batch 1 -> w0: 1.0 1.1", "batch 2 -> w0: 1.2 1.3"]
    assert story.done("w0", 1) == ["result -> f0: 1.0 1.1", "batch 3 -> w0: 1.4 1.5"]
    assert story.submit(2, [1] * 9) == []
    assert story.done("w0", 2) == ["result -> f0: 1.2 1.3", "batch 4 -> w0: 2.0 1.6"]


def test_the_second_credit_takes_less_only_when_the_running_batch_is_about_to_end() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, [10])
    story.now += 0.1
    story.done("w0", 1)  # 10 ms per token
    assert story.submit(2, [10]) == ["batch 2 -> w0: 2.0"]
    story.now += 0.05
    assert story.submit(3, [10]) == []
    assert story.core.next_deadline() == pytest.approx(story.now + 0.048)
    assert story.wait(0.047) == []
    assert story.wait(0.002) == ["batch 3 -> w0: 3.0"]


def test_a_full_batch_is_handed_over_in_the_last_part_of_the_running_one() -> None:
    """Until then it waits where a request that comes later can still go before it."""
    story = Story(max_batch_size=10, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, [1] * 10)
    story.now += 0.1
    story.done("w0", 1)  # full batches take 100 ms
    assert story.submit(2, [1] * 30) == ["batch 2 -> w0: " + " ".join(f"2.{index}" for index in range(10))]
    assert story.core.next_deadline() == pytest.approx(story.now + 0.07)
    assert story.wait(0.06) == []
    assert story.submit(3, priority=-1) == []
    assert story.wait(0.011)[0].startswith("batch 3 -> w0: 3.0 2.10")
    assert story.wait(0.1) == []  # there is no third


def test_no_second_credit_while_another_worker_is_idle() -> None:
    story = Story(max_batch_size=4, max_queue_delay=10.0).with_frontend().with_workers("w0", "w1")
    assert story.submit(1, [1] * 4) == ["batch 1 -> w0: 1.0 1.1 1.2 1.3"]
    assert story.submit(2, [1] * 4) == ["batch 2 -> w1: 2.0 2.1 2.2 2.3"]
    assert story.submit(3, [1] * 4) == ["batch 3 -> w0: 3.0 3.1 3.2 3.3"]


@pytest.mark.parametrize(
    ("setting", "own", "expected"),
    [(10, 100, 10), (100, 10, 10), ("auto", 10, 10)],
)
def test_the_token_limit_is_the_smaller_of_setting_and_worker(setting: int | str, own: int, expected: int) -> None:
    story = Story(max_num_tokens=setting, max_queue_delay=0.0).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(max_batch_size=100, max_num_tokens=own))
    story.submit(1, [1] * 100)
    assert len(story.sent[1].work.lengths) == expected


def test_a_worker_with_small_limits_leaves_long_inputs_to_the_others() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(max_batch_size=8, max_num_tokens=10))
    story.with_workers("w1", limits=WorkerLimits(max_batch_size=8, max_num_tokens=100))
    lines = story.feed(submit_many([(1, [50]), (2, [5])]))
    assert lines == ["batch 1 -> w0: 2.0", "batch 2 -> w1: 1.0"]


def test_a_long_input_waits_for_its_worker_without_spinning() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(max_batch_size=8, max_num_tokens=10))
    story.with_workers("w1", limits=WorkerLimits(max_batch_size=8, max_num_tokens=100))
    assert story.submit(1, [50]) == ["batch 1 -> w1: 1.0"]
    assert story.submit(2, [60]) == []
    assert story.wait_alive(5.0, "w0", "w1") == []
    assert story.done("w1", 1) == ["result -> f0: 1.0", "batch 2 -> w1: 2.0"]


def test_64_singles_at_once_make_batches_of_16() -> None:
    story = Story(max_batch_size=16, max_queue_delay=0.05).with_frontend().with_workers("w0", "w1")
    lines = [line for rid in range(64) for line in story.submit(rid)]
    assert [len(story.sent[batch].work.lengths) for batch in story.sent] == [16] * 4
    assert [line.split()[3] for line in lines] == ["w0:", "w1:", "w0:", "w1:"]


def test_options_ride_along_only_when_some_input_has_them() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1, [3]), submit(2, [4], options=EncodeOptions(prompt_tokens=2)))
    assert story.sent[1].work.options == [EncodeOptions(), EncodeOptions(prompt_tokens=2)]
    story.submit(3)
    assert story.sent[2].work.options == []


def test_one_result_per_batch_and_frontend() -> None:
    story = Story(max_queue_delay=0.0).with_frontend("f0").with_frontend("f1").with_workers("w0")
    story.feed(submit_many([(1, [1]), (2, [1, 1])]), submit(1, [2], frontend="f1"), submit(3))
    assert story.done("w0", 1) == ["result -> f0: 1.0 2.0 2.1 3.0", "result -> f1: 1.0"]


def test_a_batch_of_very_many_small_requests_is_told_in_several_messages() -> None:
    story = Story(max_batch_size=4096, max_queue_size=5000, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit_many([(rid, [1]) for rid in range(4000)]))
    lines = story.done("w0", 1)
    assert len(lines) == 4
    assert sum(len(line.split()) - 3 for line in lines) == 4000


def test_auto_delay_lets_a_lone_request_leave_at_once() -> None:
    story = Story(max_queue_delay="auto").with_frontend().with_workers("w0")
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]


def test_auto_delay_lets_a_sequential_client_leave_at_once_however_fast_it_is() -> None:
    story = Story(max_queue_delay="auto").with_frontend().with_workers("w0")
    for rid in range(1, 50):
        story.now += 0.001
        assert story.submit(rid) == [f"batch {rid} -> w0: {rid}.0"]
        assert story.done("w0", rid) == [f"result -> f0: {rid}.0"]


def test_auto_delay_holds_a_burst_for_at_most_5_ms() -> None:
    story = Story(max_queue_delay="auto", max_batch_size=1000).with_frontend().with_workers("w0")
    for rid in range(40):
        story.now += 0.0005
        story.submit(rid)
    story.done("w0", 1)
    held_since = story.now
    while 2 not in story.sent:
        story.now += 0.0005
        story.submit(100 + len(story.sent) * 1000 + round((story.now - held_since) * 1e6))
    assert story.now - held_since <= 0.005
    assert len(story.sent[2].work.lengths) >= 39


def test_auto_delay_ends_when_the_burst_does() -> None:
    story = Story(max_queue_delay="auto", max_batch_size=1000).with_frontend().with_workers("w0", "w1")
    story.submit(900)
    for rid in range(40):
        story.now += 0.0001
        story.submit(rid)
    held = [line for line in story.done("w1", 2) if line.startswith("batch")]
    assert held == []
    assert story.submit(41) == []
    (line,) = story.wait(0.0011)
    assert line.startswith("batch 3 -> w1: ")


def test_requests_wait_for_a_worker_that_joins() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    assert story.submit(1, resubmitted=True) == []
    story.feed(hello("w0"))
    lines = story.passed("w0")
    assert "batch 1 -> w0: 1.0" in lines


def test_a_busy_worker_that_cannot_take_what_waits_is_not_asked_again_and_again() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(max_batch_size=8, max_num_tokens=10))
    story.with_workers("w1", limits=WorkerLimits(max_batch_size=8, max_num_tokens=100))
    story.submit(1, [5])
    story.now += 0.01
    story.done("w0", 1)
    story.submit(2, [50])
    story.submit(3, [5])
    assert [batch.worker for batch in story.sent.values()] == [b"w0", b"w1", b"w0"]
    assert story.submit(4, [60]) == []
    assert story.wait_alive(2.0, "w0", "w1") == []
