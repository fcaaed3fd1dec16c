"""Defines wrong fixes that look right: edits of this package that mostly pass vLLM's own tests.

Three of them pass the manager tests of 0.29.0, and the last one everything that upstream has.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import vllm_mamba_retire

_LOOP = "        freed: list[Block] = []\n"
_MOVE = "self.watermarks[request_id] = last_block"


class EditError(Exception):
    """The text that an edit replaces is not there exactly once."""


@dataclass(frozen=True, slots=True)
class WrongFix:
    """An edit of one module: `old` stands in it once and becomes `new`."""

    name: str
    module: str
    old: str
    new: str

    def of(self, source: str) -> str:
        """The edited text.

        Raises:
            EditError: the module has changed; adapt this edit to it.
        """
        if source.count(self.old) != 1:
            raise EditError(f"{self.name}: {self.old!r} is in {self.module} not exactly once")
        return source.replace(self.old, self.new)


WRONG_FIXES = (
    WrongFix(
        "frees one block too many",
        "retirement",
        _LOOP,
        f"        last_block = min(last_block + 1, len(table))\n{_LOOP}",
    ),
    WrongFix(
        "frees two too many",
        "retirement",
        _LOOP,
        f"        last_block = min(last_block + 2, len(table))\n{_LOOP}",
    ),
    WrongFix(
        "frees but leaves the block in the table",
        "retirement",
        "            table[index] = null_block\n",
        "",
    ),
    WrongFix("watermark one too high", "retirement", _MOVE, _MOVE + " + 1"),
    WrongFix(
        "watermark kept after the request ends",
        "binding",
        "        _state(self, installed).forget(request_id)\n",
        "",
    ),
    WrongFix(
        "stops at the first null",
        "retirement",
        "                continue\n",
        "                break\n",
    ),
    WrongFix(
        "no watermark at all",
        "retirement",
        "max(first_block, self.watermarks.get(request_id, 0) if same else 0)",
        "max(first_block, 0)",
    ),
)


def package_with(name: str, folder: Path) -> Path:
    """Copy this package into `folder` with the wrong fix of that name; put `folder` on the path."""
    (fix,) = (fix for fix in WRONG_FIXES if fix.name == name)
    package = folder / vllm_mamba_retire.__name__
    source = Path(vllm_mamba_retire.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    module = package / f"{fix.module}.py"
    module.write_text(fix.of(module.read_text()))
    return folder
