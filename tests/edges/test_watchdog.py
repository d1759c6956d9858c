"""A loop that is stuck ends its process, and says where it was stuck."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import re, threading, time
from packhorse_shared.watchdog import Watchdog

def stuck_here():
    {how}

watchdog = Watchdog(0.3)
until = time.monotonic() + 0.9
while time.monotonic() < until:
    watchdog.feed()
    time.sleep(watchdog.longest_wait_s / 2)
print("alive", flush=True)
stuck_here()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_a_loop_that_spins_ends_the_process() -> None:
    ended = run(STUCK.format(how="while True: pass"))
    assert (ended.returncode, ended.stdout) == (1, "alive\n")
    assert "in stuck_here" in ended.stderr


def test_a_loop_that_holds_the_interpreter_lock_ends_the_process() -> None:
    ended = run(STUCK.format(how="re.match('(a+)+b', 'a' * 64)"))
    assert (ended.returncode, ended.stdout) == (1, "alive\n")
    assert "in stuck_here" in ended.stderr


def test_a_loop_that_waits_for_a_lock_ends_the_process() -> None:
    assert run(STUCK.format(how="lock = threading.Lock(); lock.acquire(); lock.acquire()")).returncode == 1


def test_at_rest_it_bites_nobody() -> None:
    ended = run(STUCK.format(how="watchdog.rest(); time.sleep(0.6)"))
    assert (ended.returncode, ended.stderr) == (0, "")
