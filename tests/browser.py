"""A real Chromium without a window, for tests of pages. Spoken to over two pipes, in the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waiting import wait_until

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new --remote-debugging-pipe --no-first-run --no-default-browser-check --disable-gpu --disable-dev-shm-usage "
    "--disable-background-networking --disable-component-update --disable-sync --disable-extensions --mute-audio "
    "--disable-background-timer-throttling --disable-renderer-backgrounding --disable-backgrounding-occluded-windows "
    "--force-color-profile=srgb --hide-scrollbars --no-sandbox --no-proxy-server --lang=en-GB"
).split()
_ANSWER_WITHIN_S = 30.0


def find_chromium() -> str:
    """The browser's path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    return found


class Browser:
    """One running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self._process = process
        self._commands = commands
        self._answers = answers
        self._ids = itertools.count(1)
        self._results: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = wait_until(lambda: self._results.pop(number, None), _ANSWER_WITHIN_S, f"an answer to {method}")
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page of its own, with its own storage."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.ask(f"{domain}.enable")
        page.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        page.resize(width, height)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        page.ask("Emulation.setEmulatedMedia", features=features)
        page.ask("Page.navigate", url=url)
        return page

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.ask("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        os.close(self._commands)
        os.close(self._answers)

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._answers, 1 << 20):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._results[message["id"]] = message
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].events.append(message)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def connect(self, *, is_connected: bool) -> None:
        """Cut the page off from the network, or end that."""
        speeds = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.ask("Network.emulateNetworkConditions", offline=not is_connected, **speeds)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self._run(expression)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, within_s: float = 20.0) -> Any:
        """The value of an expression, once it is true; one that fails is not, for the page may be half there."""
        return wait_until(lambda: self._try(expression), within_s, f"{expression} on the page")

    def _run(self, expression: str) -> dict[str, Any]:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)

    def _try(self, expression: str) -> Any:
        found = self._run(expression)
        return None if "exceptionDetails" in found else found["result"].get("value")

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def press(self, key: str) -> None:
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.ask("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """All of the page, as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def urls(self) -> list[str]:
        """All that the page asked for, data: addresses left out."""
        sent = [event["params"]["request"]["url"] for event in self._seen("Network.requestWillBeSent")]
        return [url for url in sent if not url.startswith("data:")]

    def faults(self) -> list[str]:
        """Uncaught exceptions, errors and warnings of the console, refusals of the content security policy.

        That an answer was no 2xx, which Chromium reports as well, is none.
        """
        found = [str(event["params"]["exceptionDetails"]) for event in self._seen("Runtime.exceptionThrown")]
        found += [
            str(event["params"]["args"])
            for event in self._seen("Runtime.consoleAPICalled")
            if event["params"]["type"] in ("error", "warning", "assert")
        ]
        entries = [event["params"]["entry"] for event in self._seen("Log.entryAdded")]
        found += [entry["text"] for entry in entries if entry["source"] != "network" and entry["level"] in ("error", "warning")]
        return found

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["method"] == method]


def _pipe(*, reads: bool) -> tuple[int, int]:
    """The child's end, which is none of the descriptors that it must become, and ours."""
    ends = os.pipe()
    theirs, ours = ends if reads else ends[::-1]
    moved = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(theirs)
    return moved, ours


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A Chromium with a profile of its own, ended with the block."""
    path = find_chromium()
    with tempfile.TemporaryDirectory(prefix="ph-browser-", ignore_cleanup_errors=True) as profile:
        commands_read, commands = _pipe(reads=True)
        answers_write, answers = _pipe(reads=False)
        # Chromium reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$@" 3<&{commands_read} 4>&{answers_write} {commands_read}<&- {answers_write}>&-'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", path, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands_read, answers_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_read)
        os.close(answers_write)
        browser = Browser(process, commands, answers)
        try:
            yield browser
        finally:
            browser.close()
