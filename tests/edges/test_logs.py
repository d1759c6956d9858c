"""Log lines: one per record, nothing that came over a socket can forge another."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_shared.logs import JsonFormatter, TextFormatter, configure_logs, escape
from packhorse_shared.settings import ProcessSettings

FORMATTERS: list[logging.Formatter] = [TextFormatter("broker"), JsonFormatter("broker")]


def record(message: str, *, failed: bool = False, **fields: object) -> logging.LogRecord:
    exc_info = None
    if failed:
        try:
            raise ValueError(message)
        except ValueError:
            exc_info = sys.exc_info()
    made = logging.LogRecord("x", logging.INFO, "f.py", 1, "%s", (message,), exc_info)
    made.created, made.msecs = 0.0, 42.0
    made.__dict__.update(fields)
    return made


def test_text() -> None:
    line = TextFormatter("broker").format(record("worker joined", worker="worker-0", pid=17))
    assert line == "1970-01-01T00:00:00.042Z INFO broker worker joined worker=worker-0 pid=17"


def test_json() -> None:
    line = json.loads(JsonFormatter("broker").format(record("worker joined", worker="worker-0", pid=17)))
    assert line == {
        "time": "1970-01-01T00:00:00.042Z",
        "level": "info",
        "process": "broker",
        "message": "worker joined",
        "worker": "worker-0",
        "pid": 17,
    }


def test_tracebacks_are_indented_or_in_the_object() -> None:
    text = TextFormatter("broker").format(record("bad\nline", failed=True))
    assert "bad\\nline" in text.splitlines()[0]
    assert all(line.startswith("    ") for line in text.splitlines()[1:])
    assert "ValueError" in json.loads(JsonFormatter("broker").format(record("x", failed=True)))["traceback"]


@given(text=st.text(st.characters(), max_size=40))
def test_no_text_makes_a_second_line_or_moves_a_cursor(text: str) -> None:
    for formatter in FORMATTERS:
        line = formatter.format(record(text, field=text))
        assert len(line.splitlines()) == 1
        assert not [each for each in line if unicodedata.category(each) == "Cc"]
        line.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\r\t", "a\\nb\\r\\t"),
        ("\x1b[2J\x00", "\\x1b[2J\\x00"),
        ("\x85\u2028\u2029", "\\x85\\u2028\\u2029"),
        ("\ud83d", "\\ud83d"),
        ("größe 😀", "größe 😀"),
    ],
)
def test_escape(text: str, expected: str) -> None:
    assert escape(text) == expected


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_configure(log_format: str) -> None:
    sink = io.StringIO()
    settings = ProcessSettings(log_level="warning", log_format="json" if log_format == "json" else "text")
    configure_logs(settings, "worker-3", sink)
    logging.getLogger().info("not shown")
    logging.getLogger().warning("shown")
    lines = sink.getvalue().splitlines()
    assert len(lines) == 1
    assert "worker-3" in lines[0]
    assert lines[0].startswith("{") == (log_format == "json")
