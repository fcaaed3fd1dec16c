"""``diff``, ``apply``, ``check`` and ``revert``: the fix on disk.

Talks to people and gives exit codes; what the commands mean is in `vllm_mamba_retire.patchset`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_mamba_retire.patchset.operations import Known
    from vllm_mamba_retire.patchset.transaction import Edit
    from vllm_mamba_retire.patchset.tree import Tree

SCHEMA = 1

Target = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds vllm/: a site-packages or a source checkout. "
        "By default that of the vLLM which this interpreter imports.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout.")]
Tests = Annotated[
    bool, typer.Option("--tests", help="Handle the tests for vLLM's own tree too (checkouts).")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def diff(target: Target = None, tests: Tests = False) -> None:
    """Show what ``apply`` would change, as a diff for ``patch -p1``.

    Exit 0: known tree. Exit 1: a tree that apply would refuse. Exit 2: no vLLM there.
    """
    with _reported(_Report("diff", as_json=False)) as report:
        from vllm_mamba_retire.patchset import operations

        tree = _look(report, _known(), target, tests)
        edits = operations.to_apply(tree)
        typer.echo(operations.as_diff(tree.root, edits), nl=False)
        report.sentence = "" if edits else "the series is applied; there is nothing to change"


def check(target: Target = None, tests: Tests = False, as_json: Json = False) -> None:
    """Tell the state of a tree by hashes: pristine, applied, half applied, outdated, foreign.

    Exit 0: applied, or a release that needs nothing. Exit 1: anything else. Exit 2: no vLLM there.
    """
    with _reported(_Report("check", as_json)) as report:
        from vllm_mamba_retire.patchset.tree import State

        tree = _look(report, _known(), target, tests)
        report.files = {str(file.path): file.state.value for file in tree.files}
        report.sentence = {
            State.PRISTINE: "as released; run apply to patch it",
            State.APPLIED: "the series is applied",
            State.HALF_APPLIED: "part of the series is applied and nothing else; run apply to "
            "finish or revert to go back",
            State.OUTDATED: "patched by another version of this series; run apply to renew it",
            State.FOREIGN: "somebody else changed it; neither apply nor revert will touch it",
            State.NOT_COVERED: tree.note,
        }[tree.state]
        fine = tree.state is State.APPLIED or (tree.state is State.NOT_COVERED and tree.settled)
        report.exit_code = 0 if fine else 1


def apply(
    target: Target = None,
    yes: Yes = False,
    tests: Tests = False,
    probe: Annotated[
        bool, typer.Option(help="Ask the patched code in a process of its own how it behaves.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Put the patch series on a vLLM tree: shows the diff, asks, and goes back on any failure.

    Exit 0: applied, now or before. Exit 1: refused or failed, nothing changed. Exit 2: usage.
    """
    with _reported(_Report("apply", as_json)) as report:
        from vllm_mamba_retire.patchset import operations

        known = _known()
        tree = _look(report, known, target, tests)

        def verify() -> None:
            if probe:
                report.probe = operations.require_fixed(tree.root).detail

        edits = operations.to_apply(tree)
        if edits:
            _agree(report, tree, edits, yes)
        operations.perform(
            tree.root, known, operations.to_apply, edits, verify, tests, _say_waiting
        )
        report.done(edits, "applied" if edits else "was applied already")


def revert(
    target: Target = None, yes: Yes = False, tests: Tests = False, as_json: Json = False
) -> None:
    """Take the patch series off a vLLM tree: the files are byte for byte as released again.

    Exit 0: as released, now or before. Exit 1: refused or failed, nothing changed. Exit 2: usage.
    """
    with _reported(_Report("revert", as_json)) as report:
        from vllm_mamba_retire.patchset import operations

        known = _known()
        tree = _look(report, known, target, tests)
        edits = operations.to_revert(tree)
        if edits:
            _agree(report, tree, edits, yes)
        operations.perform(
            tree.root, known, operations.to_revert, edits, lambda: None, tests, _say_waiting
        )
        report.done(edits, "reverted" if edits else "was as released already")


@dataclass
class _Report:
    """What a command has to say in the end."""

    command: str
    as_json: bool
    root: Path | None = None
    version: str | None = None
    series: str | None = None
    state: str | None = None
    sentence: str = ""
    probe: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exit_code: int = 0

    def done(self, edits: Sequence[Edit], what: str) -> None:
        """The command has done its work."""
        from vllm_mamba_retire.patchset.surroundings import notes

        assert self.root is not None
        self.state = "applied" if self.command == "apply" else "pristine"
        self.files = {str(edit.path): what for edit in edits}
        self.notes = list(notes(self.root))
        probed = f" and probed: {self.probe}" if self.probe else ""
        self.sentence = f"{what}{probed}"

    def show(self) -> None:
        """Print it: JSON on stdout, or one line for people on stderr."""
        if self.as_json:
            fields: dict[str, Any] = {"schema": SCHEMA, **vars(self)}
            fields["root"] = str(self.root) if self.root else None
            del fields["as_json"]
            typer.echo(json.dumps(fields, indent=2))
            return
        where = f"vLLM {self.version} at {self.root}: " if self.root else ""
        state = f"{self.state}: " if self.command == "check" and self.state else ""
        if self.sentence:
            typer.echo(f"{where}{state}{self.sentence}", err=True)
        for path, what in self.files.items() if self.command == "check" else ():
            typer.echo(f"  {what:12} {path}", err=True)
        for note in self.notes:
            typer.echo(f"  note: {note}", err=True)


@contextmanager
def _reported(report: _Report) -> Iterator[_Report]:
    """Turn what can go wrong into a sentence and an exit code, and print the report."""
    from vllm_mamba_retire.patchset.operations import RefusedError
    from vllm_mamba_retire.patchset.series import SeriesError
    from vllm_mamba_retire.patchset.transaction import RollbackError, TransactionError
    from vllm_mamba_retire.patchset.tree import TreeError
    from vllm_mamba_retire.releases import MatrixError

    try:
        yield report
    except (TreeError, SeriesError, MatrixError, RollbackError) as error:
        report.sentence, report.exit_code = str(error), 2
    except TransactionError as error:
        report.sentence, report.exit_code = f"failed, nothing was changed: {error}", 1
    except RefusedError as error:
        report.sentence, report.exit_code = f"refused, nothing was changed: {error}", 1
    report.show()
    raise typer.Exit(report.exit_code)


def _known() -> Known:
    from vllm_mamba_retire.patchset.operations import Known
    from vllm_mamba_retire.patchset.series import shipped_series
    from vllm_mamba_retire.releases import load_matrix

    matrix = load_matrix()
    return Known(matrix, shipped_series(matrix))


def _look(report: _Report, known: Known, target: Path | None, tests: bool) -> Tree:
    from vllm_mamba_retire.patchset.tree import look, root_of

    report.root = root_of(target or _installed())
    tree = look(report.root, known.matrix, known.series, tests)
    report.version = tree.version
    report.series = tree.series.name if tree.series else None
    report.state = tree.state.value
    return tree


def _installed() -> Path:
    from vllm_mamba_retire.patchset.tree import TreeError
    from vllm_mamba_retire.target import find_target

    if (found := find_target()) is None:
        raise TreeError(f"{sys.executable} finds no vLLM; name a tree with --target")
    return found.package


def _agree(report: _Report, tree: Tree, edits: Sequence[Edit], yes: bool) -> None:
    """Show the diff and ask; comes back only if the answer is yes."""
    from vllm_mamba_retire.patchset.operations import RefusedError, as_diff

    if not report.as_json:
        _show_diff(as_diff(tree.root, edits))
    if yes:
        return
    if report.as_json or not sys.stdin.isatty():
        typer.echo("there is nobody to ask: pass --yes", err=True)
        raise typer.Exit(2)
    if not typer.confirm(f"Change vLLM {tree.version} at {tree.root}?", err=True):
        raise RefusedError("not agreed to")


def _show_diff(text: str) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(stderr=True)
    # Without a terminal: the plain text, neither wrapped nor coloured.
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        typer.echo(text, nl=False, err=True)


def _say_waiting() -> None:
    typer.echo("another process works on this tree; waiting for it", err=True)
