"""One run of the command: ask the servers, warm them up, load them slice by slice, report."""

from __future__ import annotations

import asyncio
import importlib
import math
import resource
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from aiohttp import ClientSession

from packhorse.bench import BenchError
from packhorse.bench.bodies import Body, Recipe, bodies_of_requests, bodies_of_set, bodies_of_texts
from packhorse.bench.load import Load, Plan
from packhorse.bench.options import Options
from packhorse.bench.own_file import OwnFile, read_own_file
from packhorse.bench.progress import ProgressBar
from packhorse.bench.report import RunReport, report_of_run, verdict
from packhorse.bench.samples import Samples
from packhorse.bench.sender import Sender
from packhorse.bench.stop import Stop
from packhorse.bench.tables import print_report
from packhorse.bench.target import Target, ask_target, base_url, open_session
from packhorse.bench.texts import SETS, Texts, most_words

_OWN_DESCRIPTORS = 64

Measured = list[tuple[Target, list[Samples]]]
"""Each server that was loaded, with its slices."""


def run(options: Options) -> int:
    """Returns 0 when something was answered and nothing failed in transport. Raises BenchError with one line otherwise, after
    the report where there is one."""
    _allow_connections(options.connections if options.rate else options.concurrency)
    own = None if options.texts in SETS else _own_file(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(_measure(options, own))
    inputs = None if own is not None and own.requests else _inputs(options)
    report = report_of_run(options, measured, inputs, is_cut=own is not None and own.is_cut)
    print_report(report, to_stderr=options.json == "-")
    _write_files(options, report, measured)
    problem = verdict(report)
    if problem is not None:
        raise BenchError(problem)
    return 0


async def _measure(options: Options, own: OwnFile | None) -> Measured:
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(open_session(url, options.api_key, options.timeout)) for url in options.urls
        ]
        targets = [await ask_target(session, url, options.model) for session, url in zip(sessions, options.urls, strict=True)]
        stop = Stop()
        longest = min(most_words(target.max_seq_len) for target in targets)
        loads = [
            Load(_sender(session, target, options), _bodies(options, own, target, longest), stop)
            for session, target in zip(sessions, targets, strict=True)
        ]
        slices = await _load_in_turn(options, loads, stop)
    measured = [(target, samples) for target, samples in zip(targets, slices, strict=True) if samples]
    if not measured:
        raise BenchError("interrupted while warming up; nothing was measured")
    return measured


async def _load_in_turn(options: Options, loads: list[Load], stop: Stop) -> list[list[Samples]]:
    """The slices of each server. Servers that are compared get the same requests at the same distances."""
    plan = _plan(options)
    warmup = msgspec.structs.replace(plan, duration_s=options.warmup, requests=None)
    turns = [(each, warmup, "warm-up") for each in range(len(loads))] if options.warmup else []
    turns += [(each, plan, f"round {number}") for number in range(1, options.rounds + 1) for each in range(len(loads))]
    slices: list[list[Samples]] = [[] for _ in loads]
    with stop.on_signals(), ProgressBar(len(turns)) as bar:
        for index, its_plan, name in turns:
            if stop.is_requested:
                break
            bar.begin(f"{options.urls[index]}, {name}" if len(loads) > 1 else name)
            samples = await loads[index].slice(its_plan, f"{options.seed} {name}", partial(bar.show, its_plan))
            if its_plan is plan:
                slices[index].append(samples)
    return slices


def _plan(options: Options) -> Plan:
    return Plan(
        clients=options.connections if options.rate else options.concurrency,
        rate=options.rate,
        duration_s=None if options.duration is None else options.duration / options.rounds,
        requests=None if options.requests is None else math.ceil(options.requests / options.rounds),
    )


def _sender(session: ClientSession, target: Target, options: Options) -> Sender:
    return Sender(session, f"{base_url(target.url)}/v1/{options.endpoint}")


def _own_file(options: Options) -> OwnFile:
    own = read_own_file(options.texts, options.endpoint)
    if own.requests and options.inputs is not None:
        raise BenchError(f"--inputs: {options.texts} holds whole requests, which are sent as they are; leave it out")
    return own


def _bodies(options: Options, own: OwnFile | None, target: Target, longest: int) -> list[Body]:
    recipe = Recipe(options.endpoint, _inputs(options), target.model, options.encoding_format)
    if own is None:
        return bodies_of_set(recipe, Texts(options.texts, longest, options.seed))
    return bodies_of_requests(recipe, own.requests) if own.requests else bodies_of_texts(recipe, own.texts)


def _inputs(options: Options) -> int:
    """In each request made of texts."""
    return options.inputs or (SETS[options.texts].inputs if options.texts in SETS else 1)


def _write_files(options: Options, report: RunReport, measured: Measured) -> None:
    try:
        if options.json is not None:
            text = msgspec.json.format(msgspec.json.encode(report)).decode()
            if options.json == "-":
                print(text)
            else:
                Path(options.json).expanduser().write_text(f"{text}\n", encoding="utf-8")
        if options.plot is not None:
            # Only here: importing matplotlib takes most of a second.
            importlib.import_module("packhorse.bench.plot").draw(report, measured, Path(options.plot).expanduser())
    except OSError as problem:
        raise BenchError(f"cannot write {problem.filename}: {problem.strerror}") from None


def _allow_connections(connections: int) -> None:
    """Raise the limit of open files as far as it is needed. Raises BenchError when that is not allowed."""
    wanted = connections + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(f"{connections} connections need {wanted} open files, the limit is {hard} (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
