"""Links of the pages as they are browsed in the repository; mkdocs checks those of the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages

_LINK = re.compile(r"\[[^\]]*\]\(((?!https?:|mailto:)[^)\s]+)\)")
_PAGES = [*pages(), ROOT / "CHANGELOG.md"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file or no heading."""
    found = []
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](none.md) [c](page.md#two) [d](https://example.org)\n")
    assert broken(page) == ["none.md", "page.md#two"]
