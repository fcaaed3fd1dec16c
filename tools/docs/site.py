"""mkdocs hooks for pages that are not in docs/, and for links to files outside of it.

Some pages of the repository (patches/README.md and others) are part of the site. Links are written
for readers of the repository: a link to one of those pages is changed to its place on the site, and
a link to any other file becomes its path as text. A broken link is a warning, which fails a strict
build.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SHOWN = {
    "patches/README.md": "on-disk-series.md",
    "docs/deploy/README.md": "deploy/README.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#)[^)\s]+)\)")
_logger = logging.getLogger("mkdocs.site")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and the command line's own description."""
    for path, shown in SHOWN.items():
        if not path.startswith("docs/"):
            text = (ROOT / path).read_text()
            files.append(File.generated(config, shown, content=text))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where their target is on the site."""
    written = {shown: path for path, shown in SHOWN.items()}
    source = written.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def resolve(match: re.Match[str]) -> str:
        text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in SHOWN:
            return f"[{text}]({posixpath.relpath(SHOWN[target], here or '.')}{hash_}{anchor})"
        if target.startswith("docs/") and not source.startswith("docs/"):
            inside = target.removeprefix("docs/")
            return f"[{text}]({posixpath.relpath(inside, here or '.')}{hash_}{anchor})"
        if target.startswith("docs/") or page.file.src_uri.startswith("reference/"):
            return match.group()
        if not (ROOT / target).exists():
            _logger.warning("%s links to %s, which does not exist", source, target)
        return text if text == target or text.strip("`") == target else f"{text} (`{target}`)"

    return _LINK.sub(resolve, markdown)


def _command_line() -> str:
    import typer
    from typer.cli import get_docs_for_click

    from vllm_mamba_retire.cli import app

    os.environ["COLUMNS"] = "100"
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="vllm-mamba-retire")
    return str(get_docs_for_click(obj=command, ctx=context, name="vllm-mamba-retire"))
