"""Holds a vLLM on disk against the table: what can be known of it without importing it.

Start-up in a vLLM process and the commands that only look begin with the same evidence, so that
they cannot come to different verdicts about the same file.
"""

from __future__ import annotations

from dataclasses import replace

from .fingerprint import fingerprints
from .releases import Matrix, Row
from .target import Target
from .verdict import Evidence, Mode


def sight(mode: Mode, target: Target | None, matrix: Matrix) -> Evidence:
    """What the files say.

    Args:
        mode: what the operator asked for.
        target: the vLLM on disk, or None.
        matrix: the table to hold it against.

    Returns:
        Evidence in which nothing of a running process is filled in yet.
    """
    if target is None or target.source is None:
        return Evidence(mode, target)
    if (series := matrix.series_on(target.sha256)) is not None:
        return Evidence(mode, target, series=series.series)
    try:
        row, changed = compare(matrix, target)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        problem = f"{target.manager_file} does not parse ({error.args[0]}{line})"
        return Evidence(mode, replace(target, source=None, problem=problem))
    return Evidence(mode, target, row=row, changed=changed)


def compare(matrix: Matrix, target: Target) -> tuple[Row | None, tuple[str, ...]]:
    """Look for a vLLM's methods in the table.

    Returns:
        The row that has the same methods, if any, and else the methods that differ from the row
        of its version.

    Raises:
        SyntaxError: the source does not parse; a ValueError where it holds null bytes.
    """
    own = matrix.row_for(target.version)
    if own is not None and own.manager_sha256 == target.sha256:
        return own, ()
    found = fingerprints(target.source or "", matrix.methods)
    row = matrix.row_like(found, target.version)
    if row is not None or own is None:
        return row, ()
    names = (name for name in matrix.methods if found.get(name) != own.fingerprints.get(name))
    return None, tuple(names)
