"""Who goes next: priorities, the floor under them, and turns inside a class."""

from __future__ import annotations

from broker_story import Story, inputs_of, submit, submit_many
from packhorse_broker.fairness import FLOOR_EVERY, QUANTUM_TOKENS


def _blocked(**values: object) -> Story:
    """A server whose worker runs one batch and has one at hand, so that what comes now waits."""
    story = Story(max_queue_delay=0.0, max_queue_size=100_000, **values).with_frontend().with_workers("w0")
    story.submit(900, [1] * 2 * story.settings.batching.max_batch_size)
    return story


def _next_batches(story: Story, count: int) -> list[list[tuple[int, int]]]:
    """The inputs of the next batches, each answered as it comes."""
    first = len(story.sent) + 1
    for batch in range(first - 2, first - 2 + count):
        story.done("w0", batch)
    return [inputs_of(story.sent[batch]) for batch in range(first, first + count) if batch in story.sent]


def test_lower_numbers_run_first() -> None:
    story = _blocked(max_batch_size=2)
    story.feed(submit(1, [1], priority=5), submit(2, [1], priority=0), submit(3, [1], priority=-7), submit(4, [1]))
    assert _next_batches(story, 2) == [[(3, 0), (2, 0)], [(4, 0), (1, 0)]]


def test_one_batch_in_16_is_led_by_a_lower_class() -> None:
    story = _blocked(max_batch_size=2)
    story.feed(submit(1, [1] * 200), submit(2, [1] * 20, priority=9))
    batches = _next_batches(story, 3 * FLOOR_EVERY)
    low = [position for position, batch in enumerate(batches) if any(rid == 2 for rid, _ in batch)]
    assert low == [FLOOR_EVERY - 1, 2 * FLOOR_EVERY - 1, 3 * FLOOR_EVERY - 1]


def test_the_floor_serves_every_lower_class_in_turn() -> None:
    story = _blocked(max_batch_size=1)
    story.feed(submit(1, [1] * 400), submit(2, [1] * 20, priority=1), submit(3, [1] * 20, priority=2))
    low = [batch[0][0] for batch in _next_batches(story, 6 * FLOOR_EVERY) if batch[0][0] != 1]
    assert sorted(low) == [2, 2, 2, 3, 3, 3]


def test_a_single_request_does_not_wait_for_a_huge_one() -> None:
    story = _blocked(max_batch_size=32)
    story.feed(submit(1, [16] * 2048))
    _next_batches(story, 4)
    story.submit(2, [16])
    batches = _next_batches(story, 2)
    assert any((2, 0) in batch for batch in batches)


def test_a_single_request_does_not_wait_for_a_huge_one_of_short_inputs() -> None:
    """A turn in tokens alone would be several batches of these."""
    story = _blocked(max_batch_size=32)
    story.feed(submit(1, [1] * 2048))
    _next_batches(story, 4)
    for rid in range(2, 5):
        story.submit(rid, [1])
    (batch,) = _next_batches(story, 1)
    assert {rid for rid, _ in batch} == {1, 2, 3, 4}


def test_two_requests_share_by_tokens() -> None:
    story = _blocked(max_batch_size=4 * QUANTUM_TOKENS, max_num_tokens=4 * QUANTUM_TOKENS)
    story.feed(submit(1, [QUANTUM_TOKENS] * 40), submit(2, [QUANTUM_TOKENS // 16] * 640))
    served = {1: 0, 2: 0}
    for batch in _next_batches(story, 12):
        for rid, _ in batch:
            served[rid] += QUANTUM_TOKENS if rid == 1 else QUANTUM_TOKENS // 16
    assert served[1] > 0
    assert abs(served[1] - served[2]) <= 2 * QUANTUM_TOKENS


def test_inputs_longer_than_the_quantum_move_on() -> None:
    story = _blocked(max_batch_size=2)
    story.feed(submit(1, [10 * QUANTUM_TOKENS] * 2), submit(2, [10 * QUANTUM_TOKENS] * 2))
    assert _next_batches(story, 2) == [[(1, 0), (2, 0)], [(1, 1), (2, 1)]]


def test_requests_keep_their_own_order() -> None:
    story = _blocked(max_batch_size=7)
    story.feed(submit_many([(1, list(range(1, 60))), (2, list(range(60, 1, -1)))]))
    seen: dict[int, list[int]] = {1: [], 2: []}
    for batch in _next_batches(story, 19):
        for rid, index in batch:
            seen.setdefault(rid, []).append(index)
    assert seen[1] == list(range(59))
    assert seen[2] == list(range(59))
