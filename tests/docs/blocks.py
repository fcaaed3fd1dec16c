"""The command blocks of the documentation, with what is said of each in comments before it.

``<!-- not run: REASON -->``   is left out, for that reason
``<!-- in: vLLM 0.29.0 -->``   needs that release; others run where there is no vLLM
``<!-- exit: 1 -->``           ends with that status, where it is not 0

``sh`` blocks are run line by line; ``console`` blocks hold one command behind ``$`` and its output.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
Shell = Callable[..., "subprocess.CompletedProcess[str]"]  # runs command lines
_FENCE = re.compile(
    r"(?P<notes>(?:^[ ]*<!--[^\n]*-->\n)*)"
    r"^(?P<indent>[ ]*)```(?P<kind>sh|bash|shell|console)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_NOTE = re.compile(r"<!-- ([\w ]+): (.+?) -->")


@dataclass(frozen=True)
class CodeBlock:
    """One command block of a page."""

    page: str
    line: int
    kind: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """For pytest: page and line."""
        return f"{self.page}:{self.line}"

    @property
    def vllm(self) -> str | None:
        """Release that must be there."""
        return self.notes["in"].removeprefix("vLLM ") if "in" in self.notes else None

    @property
    def exit(self) -> int:
        """How it ends."""
        return int(self.notes.get("exit", "0"))


def pages() -> list[Path]:
    """Every page that is for readers."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        ROOT / "patches" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def blocks() -> Iterator[CodeBlock]:
    """Every command block of every page."""
    for page in pages():
        text = page.read_text()
        for found in _FENCE.finditer(text):
            indent = found["indent"]
            lines = [line.removeprefix(indent) for line in found["text"].splitlines(keepends=True)]
            yield CodeBlock(
                page.relative_to(ROOT).as_posix(),
                text.count("\n", 0, found.start("indent")) + 1,
                found["kind"],
                "".join(lines),
                dict(_NOTE.findall(found["notes"])),
            )


def fences() -> int:
    """How many command blocks there are, counted in another way."""
    opening = re.compile(r"^\s*```(sh|bash|shell|console)\b")
    return sum(bool(opening.match(line)) for p in pages() for line in p.read_text().splitlines())


def bare_fences() -> list[str]:
    """Fences without a language: their commands would escape the check that commands are run."""
    found = []
    for page in pages():
        inside = False
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            if line.lstrip().startswith("```"):
                inside = not inside
                if inside and line.strip() == "```":
                    found.append(f"{page.relative_to(ROOT).as_posix()}:{number}")
    return found
