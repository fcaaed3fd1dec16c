"""``diff``, ``apply``, ``check`` and ``revert``: the fix on disk.

Prints and sets the exit status; `vllm_mamba_retire.patchset` does the work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .text import safe

if TYPE_CHECKING:
    from vllm_mamba_retire.patchset import Tree

SCHEMA = 1

Target = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds vllm/: site-packages or a source checkout. "
        "Default: that of the vLLM that this Python imports.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Probe = Annotated[
    bool, typer.Option(help="Run the patched code in a child process before writing it.")
]


def diff(target: Target = None) -> None:
    """Show what apply would change, as a diff.

    The diff is for patch -p1.

    Exit 0: a known tree. Exit 1: a tree that apply would refuse. Exit 2: no vLLM there.
    """
    with _reported("diff") as report:
        from vllm_mamba_retire.patchset import RefusedError, as_diff

        tree = report.read(target)
        if tree.patched is None:
            raise RefusedError(tree.sentence)
        typer.echo(as_diff(tree, tree.patched), nl=False)
        applied = tree.data == tree.patched
        report.sentence = "the series is applied; nothing to change" if applied else ""


def check(
    target: Target = None,
    probe: Annotated[
        bool, typer.Option(help="Run code with an unknown hash in a child process.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Report the state of a vLLM tree, by its hashes.

    The state is pristine, applied, half applied, foreign change or not covered.

    Exit 0: applied, or a release that needs no patch. Exit 1: any other state. Exit 2: no vLLM
    there.
    """
    with _reported("check", as_json) as report:
        from vllm_mamba_retire.patchset import link_in, overriding_code, tidy

        tree = report.read(target, probe)
        report.files = {str(tree.file): tree.state.value}
        report.sentence = tree.sentence
        hidden = overriding_code(tree, tree.data)
        report.exit_code = 0 if tree.done and not hidden else 1
        report.notes = [
            *(f"Python runs {path} and does not compare it with the source" for path in hidden),
            *filter(None, [link_in(tree)]),
            *tidy(tree),
        ]


def apply(
    target: Target = None, yes: Yes = False, probe: Probe = True, as_json: Json = False
) -> None:
    """Apply the patch series to a vLLM tree.

    Shows the diff, asks for confirmation, probes the new code and writes the file.

    Exit 0: applied, now or before. Exit 1: refused or failed, nothing changed. Exit 2: usage error,
    or no vLLM there.
    """
    with _reported("apply", as_json) as report:
        tree = report.read(target)
        report.change(tree, tree.patched, yes, probe)


def revert(target: Target = None, yes: Yes = False, as_json: Json = False) -> None:
    """Restore the released file of a vLLM tree.

    Exit 0: as released, now or before. Exit 1: refused or failed, nothing changed. Exit 2: usage
    error, or no vLLM there.
    """
    with _reported("revert", as_json) as report:
        tree = report.read(target)
        report.change(tree, tree.released, yes, probe=False)


@dataclass
class _Report:
    """The result of a command."""

    command: str
    as_json: bool
    root: str | None = None
    version: str | None = None
    series: str | None = None
    state: str | None = None
    sentence: str = ""
    probe: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exit_code: int = 0

    def read(self, target: Path | None, probe: bool = False) -> Tree:
        """Read the tree that the command is about."""
        from vllm_mamba_retire.patchset import PatchsetError, read_tree
        from vllm_mamba_retire.releases import load_matrix
        from vllm_mamba_retire.target import find_target

        if target is None:
            if (found := find_target()) is None:
                raise PatchsetError(f"{sys.executable} finds no vLLM; name a tree with --target")
            target = found.package
        tree = read_tree(target, load_matrix(), probe)
        self.root, self.version, self.state = str(tree.root), tree.version, tree.state.value
        self.series = tree.series
        return tree

    def change(self, tree: Tree, after: bytes | None, yes: bool, probe: bool) -> None:
        """Show the change, confirm it, and write it."""
        from vllm_mamba_retire import patchset

        if after is None:
            raise patchset.RefusedError(tree.sentence)
        differs = tree.data != after
        if differs:
            self._confirm(tree, after, yes)
        # All that can fail is done before the file is replaced.
        noted = list(patchset.notes(tree, after))
        self.probe = patchset.change(tree, after, probe, _report_waiting)
        applied = after == tree.patched
        self.state, self.notes = "applied" if applied else "pristine", noted
        self.sentence = f"{self.state} already"
        if differs:
            self.sentence = "applied" if applied else "reverted"
            self.files = {str(tree.file): self.sentence}
        if self.probe:
            self.sentence += f"; probe: {self.probe}"

    def _confirm(self, tree: Tree, after: bytes, yes: bool) -> None:
        from vllm_mamba_retire.patchset import PatchsetError, RefusedError, as_diff

        if not self.as_json:
            _show_diff(as_diff(tree, after))
        if yes:
            return
        if self.as_json or not sys.stdin.isatty():
            raise PatchsetError("not a terminal, nothing was changed; pass --yes to confirm")
        if not typer.confirm(f"Change vLLM {tree.version} at {safe(tree.root)}?", err=True):
            raise RefusedError("not confirmed")

    def interrupted(self) -> None:
        """Report Ctrl-C, which may have come before the change or after it."""
        before = self.state
        if self.root:
            self.read(Path(self.root))
        changed = self.state != before
        what = f"the tree is {self.state}" if changed else "nothing was changed"
        self.sentence, self.exit_code = f"interrupted, {what}", 0 if changed else 1

    def show(self) -> None:
        """Print it: JSON on stdout, or lines on stderr."""
        if self.as_json:
            fields: dict[str, Any] = {"schema": SCHEMA, **vars(self)}
            del fields["as_json"]
            typer.echo(json.dumps(fields, indent=2))
            return
        where = f"vLLM {self.version} at {self.root}: " if self.root else ""
        state = f"{self.state}: " if self.command == "check" and self.state else ""
        lines = [f"{where}{state}{self.sentence}"] if self.sentence else []
        for line in (*lines, *(f"  note: {note}" for note in self.notes)):
            typer.echo(safe(line), err=True)


@contextmanager
def _reported(command: str, as_json: bool = False) -> Iterator[_Report]:
    """Turn errors into a sentence and an exit code, and print the report."""
    from vllm_mamba_retire.patchset import PatchsetError, RefusedError
    from vllm_mamba_retire.releases import MatrixError

    report = _Report(command, as_json)
    try:
        yield report
    except (PatchsetError, MatrixError) as error:
        report.sentence, report.exit_code = str(error), 2
    except RefusedError as error:
        report.sentence, report.exit_code = f"refused, nothing was changed: {error}", 1
    except KeyboardInterrupt:
        report.interrupted()
    try:
        report.show()
    except OSError:
        # The exit code tells about the tree. Python would replace it, if it failed to flush too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise typer.Exit(report.exit_code)


def _show_diff(text: str) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    # Without a terminal: the plain text, neither wrapped nor coloured.
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False, err=True)


def _report_waiting() -> None:
    typer.echo("another process is changing this tree; waiting for it", err=True)
