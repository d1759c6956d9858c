"""Workers that begin their second batch before the first one is answered: either may be what they die of."""

from __future__ import annotations

import pytest

from broker_story import ROOMY, Story, beat, inputs_of, lost, submit, without_logs
from packhorse_broker import events as e
from packhorse_shared.messages import WorkerLimits

OVERLAPPING = WorkerLimits(ROOMY.max_batch_size, ROOMY.max_num_tokens, overlaps=True)
FIRST_POISON = 7000
LONG_S = 9000.0


class Siege:
    """A server that always has more work than workers, which die as soon as they are sent a poison, whatever else they run."""

    def __init__(self, workers: int, batch_size: int, poisons: int) -> None:
        self.story = Story(max_batch_size=batch_size, max_queue_delay=0.0).with_frontend()
        self.batch_size = batch_size
        self.poisons = set(range(FIRST_POISON, FIRST_POISON + poisons))
        self.workers = [f"w{slot}" for slot in range(workers)]
        self.story.with_workers(*self.workers, limits=OVERLAPPING)
        self.deaths: list[int] = []
        """Whether the poison rode in the first (0) or the second (1) batch of a worker that died."""
        self.lines: list[str] = []
        self.asked: list[str] = []
        self._last_rid = 0

    def work(self) -> None:
        """Everybody answers a batch, and more work comes than that."""
        for worker in self.workers:
            if batches := self.story.open.get(worker):
                self.lines += self.story.done(worker, batches[0])
            while self.story.report().queue.inputs < 2 * self.batch_size:
                self._last_rid += 1
                self.asked += [f"{self._last_rid}.{index}" for index in range(self.batch_size)]
                self.lines += self.story.feed(submit(self._last_rid, [1] * self.batch_size, ttl_s=LONG_S))
            self._die()

    def poison(self) -> None:
        """Ask for the poisons, each a request of its own."""
        self.lines += self.story.feed(*(submit(rid, ttl_s=LONG_S) for rid in sorted(self.poisons)))
        self._die()

    def finish(self) -> None:
        """No more work: answer all there is."""
        while open_batches := [(worker, batches[0]) for worker, batches in self.story.open.items() if batches]:
            self.lines += self.story.done(*open_batches[0])
            self._die()

    def failed(self) -> list[str]:
        """Requests that failed, as lines."""
        return [line for line in self.lines if line.startswith("fail")]

    def served(self) -> list[str]:
        """Inputs that were answered, by name."""
        return [word for line in self.lines if line.startswith("result") for word in line.split()[3:]]

    def _die(self) -> None:
        """Each worker that has a poison dies and is started again; it may be sent it next."""
        while (found := self._poisoned()) is not None:
            worker, position = found
            self.deaths.append(position)
            del self.story.open[worker]
            self.lines += self.story.feed(lost(worker))
            self.story.with_workers(worker, limits=OVERLAPPING)

    def _poisoned(self) -> tuple[str, int] | None:
        for worker in self.workers:
            for position, batch in enumerate(self.story.open.get(worker, ())):
                if self.poisons & {rid for rid, _ in inputs_of(self.story.sent[batch])}:
                    return worker, position
        return None


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_a_poison_that_rides_in_the_second_batch_is_found_in_3_deaths_and_everyone_else_is_served(
    workers: int, batch_size: int
) -> None:
    siege = Siege(workers, batch_size, poisons=1)
    for _ in range(5):
        siege.work()
    siege.poison()
    while not siege.deaths:
        siege.work()
    assert siege.deaths[0] == 1, "the first worker had begun something else before it"
    for _ in range(100):
        if siege.failed():
            break
        siege.work()
    siege.finish()
    assert siege.failed() == [f"fail -> f0: {FIRST_POISON} worker_died input 0"]
    assert len(siege.deaths) == 3
    assert siege.deaths[1:] == [0, 0], "retries have their worker for themselves"
    assert sorted(siege.served()) == sorted(siege.asked)


@pytest.mark.parametrize("poisons", [2, 5])
def test_several_poisons_are_found_and_everyone_else_is_served(poisons: int) -> None:
    siege = Siege(4, 8, poisons)
    for _ in range(5):
        siege.work()
    siege.poison()
    for _ in range(200):
        if len(siege.failed()) == poisons:
            break
        siege.work()
    siege.finish()
    assert sorted(siege.failed()) == [f"fail -> f0: {rid} worker_died input 0" for rid in sorted(siege.poisons)]
    assert len(siege.deaths) <= 3 * poisons
    assert sorted(siege.served()) == sorted(siege.asked)


def two_batches() -> Story:
    """w0 has 1.0 1.1 and, begun behind it, 1.2 1.3."""
    story = Story(max_batch_size=2, max_queue_delay=0.0).with_frontend().with_workers("w0", limits=OVERLAPPING)
    story.feed(submit(1, [1] * 4))
    assert [inputs_of(batch) for batch in story.sent.values()] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    return story


def test_both_batches_of_one_that_died_are_retried_alone_first_come_first_served() -> None:
    story = two_batches()
    story.feed(lost("w0"))
    story.with_workers("w1", limits=OVERLAPPING)
    assert inputs_of(story.sent[3]) == [(1, 0), (1, 1)]
    assert story.done("w1", 3) == ["result -> f0: 1.0 1.1", "batch 4 -> w1: 1.2 1.3"]
    assert story.done("w1", 4) == ["result -> f0: 1.2 1.3"]


def test_both_batches_of_a_silent_one_are_moved_in_their_order() -> None:
    story = two_batches()
    story.with_workers("w1", limits=OVERLAPPING)
    lines = without_logs(story.wait_alive(1.25, "w1"))
    assert [line for line in lines if line.startswith("batch")] == ["batch 3 -> w1: 1.0 1.1", "batch 4 -> w1: 1.2 1.3"]


def test_the_second_silence_charges_both() -> None:
    story = two_batches()
    for _ in range(2):
        story.wait(1.0)
        story.back("w0")
    assert [inputs_of(story.sent[batch]) for batch in (3, 4)] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    assert story.open["w0"][-1] == 5, "as a suspect, it has the worker for itself"


def test_one_that_leaves_hands_both_back_uncharged() -> None:
    story = two_batches()
    story.feed(e.WorkerDrained(b"w0", []))
    story.with_workers("w1")
    story.feed(e.WorkerLeft(b"w0", ""))
    story.feed(beat("w1"))
    assert [inputs_of(story.sent[batch]) for batch in (3, 4)] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
