"""What docs/deployment.md and docs/migrating.md tell people to use fits what Packhorse does."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from packhorse_shared.arguments import Parser, add_settings
from packhorse_shared.settings import Settings

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
SETTINGS = Settings()


def _flags() -> set[str]:
    """Every flag, written with underscores."""
    parser = Parser()
    add_settings(parser)
    return {flag for action in parser._actions for flag in action.option_strings if "-" not in flag.removeprefix("--")}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "packhorse.service").read_text(encoding="utf-8")
    # It wants to see the program, which is not installed there.
    checked = tmp_path / "packhorse.service"
    checked.write_text(unit.replace("ExecStart=/opt/packhorse/bin/packhorse", "ExecStart=/bin/true"), encoding="utf-8")
    done = subprocess.run([analyze, "verify", checked], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "packhorse.service" not in done.stderr, done.stderr
    assert int(_found(r"^TimeoutStopSec=(\d+)$", unit)) > SETTINGS.process.shutdown_grace + 10


def test_the_container_is_built_from_all_that_the_wheel_needs() -> None:
    """Every folder and file that pyproject.toml packs is copied into the build."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {package.split("/")[0] for package in wheel["packages"]} | set(wheel["force-include"])
    needed |= {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert needed <= copied
    assert all((ROOT / each).exists() for each in copied)


def test_the_container_is_no_root_and_drains() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert _found(r"^USER (\S+)$", text) == "10001"
    assert _found(r"^STOPSIGNAL (\S+)$", text) == "SIGTERM"
    assert "/live" in _found(r"^HEALTHCHECK (.*)$", text)


def test_nginx_waits_longer_than_the_server_and_keeps_connections_shorter() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert int(_found(r"^ *keepalive_timeout (\d+)s;$", text)) < SETTINGS.http.keep_alive
    assert int(_found(r"^ *proxy_read_timeout (\d+)s;$", text)) > SETTINGS.http.request_timeout
    assert int(_found(r"^ *client_max_body_size (\d+)m;$", text)) << 20 > SETTINGS.http.max_body_bytes


@pytest.mark.parametrize("page", ["clients.md", "deployment.md", "migrating.md"])
def test_pages_name_flags_that_there_are(page: str) -> None:
    """In tables what is on the left is other people's; what is behind another program's name is that program's."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    ours = "\n".join(row.split(" | ", 1)[-1] for row in re.findall(r"^\| .*$", text, re.MULTILINE))
    ours += "\n".join(re.findall(r"\bpackhorse embeddings.*$", text, re.MULTILINE))
    named = set(re.findall(r"(?<![\w-])--[a-z]+_[a-z_]+", ours))
    assert named
    assert named <= _flags()


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, pattern
    return match[1]
