"""The pages that are made from the code are the ones that the code makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_settings_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_settings.py"


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))]
    assert links
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


def test_links_into_pages_name_a_heading_that_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [
        (page, *link) for page in pages for link in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert not [
        (page.name, target, anchor)
        for page, target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ]


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link: lower case, no punctuation, dashes for spaces."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_tells_langchain_users_what_to_set() -> None:
    """LangChain sends ids of another tokenizer by default."""
    assert "check_embedding_ctx_length=False" in (ROOT / "README.md").read_text(encoding="utf-8")
