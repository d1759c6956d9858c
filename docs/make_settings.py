"""Write docs/settings.md from the settings tree. ``python docs/make_settings.py``; a test compares."""

from __future__ import annotations

from pathlib import Path

from packhorse_shared.settings import SECTIONS, Flag, flags

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Every setting is a flag (`--max_batch_size 64` or `--max-batch-size 64`), an environment variable, and a key of the YAML file
that `--config` names. A flag wins over the environment, the environment over the file, the file over the default. Lists are
comma-separated, or the flag is repeated. `--triton_config FILE` takes `max_batch_size`, `max_queue_delay` and
`max_queue_size` from a Triton `config.pbtxt` where nothing else sets them. An unknown or contradictory setting stops the
start with one line that names it.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, heading in SECTIONS.items():
        parts.append(f"\n## {heading}\n\n| setting | default | meaning | environment |\n|---|---|---|---|\n")
        parts += [_row(flag) for flag in flags().values() if flag.section == section]
    return "".join(parts)


def _row(flag: Flag) -> str:
    name = f"`{flag.name}` (no flag)" if flag.yaml_only else f"`--{flag.name}`"
    words = f" ({', '.join(flag.choices)})" if len(flag.choices) > 1 else ""
    variable = f"`{flag.variable}`{', as JSON' if flag.yaml_only else ''}"
    return f"| {name} | {_default(flag)} | {flag.description}{words} | {variable} |\n"


def _default(flag: Flag) -> str:
    if flag.default is None or flag.default in ((), ""):
        return ""
    if isinstance(flag.default, bool):
        return "off"
    if isinstance(flag.default, tuple):
        return ",".join(flag.default)
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
