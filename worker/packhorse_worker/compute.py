"""A worker's life as its main thread sees it: load the model, encode batch after batch, leave."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from packhorse_shared.codec import MAX_MESSAGE_BYTES
from packhorse_shared.errors import EXIT_CANNOT_START, ModelFilesError, PackhorseError, SettingsError
from packhorse_shared.messages import BYTES_PER_VALUE, MAX_FACTS_BYTES, ModelFacts, WorkerLimits
from packhorse_shared.watchdog import Watchdog
from packhorse_worker.backend import Backend, DeviceLostError
from packhorse_worker.loop import EXIT_FAULT, GIVE_UP_AFTER_S, Link
from packhorse_worker.meeting import MeetingPoint
from packhorse_worker.orders import Break, Finish, Ready, WorkerIdentity
from packhorse_worker.running import run_in_turn, run_overlapped

log = logging.getLogger(__name__)

_MOST_REASON = 4096


def run_worker(
    meeting: MeetingPoint,
    who: WorkerIdentity,
    load: Callable[[], Backend],
    signals: int,
    *,
    exit_now: Callable[[int], None] = os._exit,
    give_up_after_s: float = GIVE_UP_AFTER_S,
    watchdog: Watchdog | None = None,
) -> int:
    """Load the model in this thread, serve the broker of ``meeting`` until told to stop; returns the exit status.

    For ``signals``, ``exit_now`` and ``watchdog`` see ``Link``. The I/O thread is a daemon: a model that hangs cannot hold the
    process.
    """
    link = Link(meeting, who, signals, exit_now, give_up_after_s, watchdog=watchdog)
    if watchdog is not None:
        watchdog.feed()  # what this thread loads may hold up the other one before it ever runs
    thread = threading.Thread(target=link.run, name="io", daemon=True)
    thread.start()
    try:
        status = _load_and_compute(link, load)
    except BaseException:
        link.order(Break())
        raise
    finally:
        thread.join()
    return link.status if link.status is not None else status


def _load_and_compute(link: Link, load: Callable[[], Backend]) -> int:
    try:
        backend = load()
        _check_facts(backend.facts)
        _check_answers(backend.facts, backend.limits)
    except DeviceLostError as problem:
        log.critical("the model could not be loaded: %s", problem)
        link.order(Break())
        return EXIT_FAULT
    except PackhorseError as problem:
        log.error("cannot start: %s", problem)  # noqa: TRY400 (the message says all; a traceback would hide it)
        link.order(Finish(str(problem)[:_MOST_REASON]))
        return EXIT_CANNOT_START
    except Exception:
        log.exception("the model could not be loaded")
        link.order(Break())
        return EXIT_FAULT
    link.memory_bytes = backend.memory_bytes()
    link.order(Ready(backend.facts, msgspec.structs.replace(backend.limits, overlaps=backend.overlaps)))
    run = run_overlapped if backend.overlaps else run_in_turn
    if not run(link, backend):
        return EXIT_FAULT
    link.order(Finish(""))
    return 0


def _check_facts(facts: ModelFacts) -> None:
    """Whether the broker will take what the model's files declare. Raises ModelFilesError: a hello that it drops would leave
    this worker loading for ever."""
    encoded = msgspec.msgpack.encode(facts)
    if len(encoded) > MAX_FACTS_BYTES:
        raise ModelFilesError(
            f"config_sentence_transformers.json: the model's names and prompts take {len(encoded)} bytes, "
            f"limit {MAX_FACTS_BYTES}; shorten or drop prompts"
        )
    try:
        msgspec.msgpack.decode(encoded, type=ModelFacts)
    except msgspec.ValidationError as problem:
        raise ModelFilesError(f"model: what its files declare cannot be served: {problem}") from None


def _check_answers(facts: ModelFacts, limits: WorkerLimits) -> None:
    """Whether the answer of every batch fits into a message. Raises SettingsError: the broker's socket would drop a larger one
    with its connection, and whoever asked would wait in vain."""
    if facts.task == "token_reward":
        name, most, unit = "max_num_tokens", limits.max_num_tokens, "tokens"
    else:
        name, most, unit = "max_batch_size", limits.max_batch_size, "inputs"
    room = MAX_MESSAGE_BYTES // (BYTES_PER_VALUE * facts.dimension)
    if most > room:
        raise SettingsError(
            name,
            f"a batch of {most} {unit} with {facts.dimension} values each would be answered with more than the "
            f"{MAX_MESSAGE_BYTES} bytes of a message; set it to at most {room}",
        )
