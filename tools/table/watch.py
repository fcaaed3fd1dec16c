"""Reports vLLM releases that the matrix lacks: whether they have known methods and the fix.

Queries the registry, opens the wheels and runs the matrix's checks; writes nothing.
docs/maintaining.md says what to do with each result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from packaging.version import Version

from tools.env.provision import ROOT, ProvisionError
from tools.table.behaviour import DOES_NOT_RUN
from vllm_mamba_retire.releases import Matrix, Row, Status, load_matrix


class Change(str, Enum):
    """How a release compares with the rows of the matrix."""

    UNCHANGED = "unchanged"  # the methods of a release that is known
    CHANGED = "changed"  # other methods
    FIX_MISSING = "fix missing"  # a release that should carry the fix, and does not


@dataclass(frozen=True)
class News:
    """One release that the matrix lacks."""

    version: str
    outcome: Change
    says: str
    broken: tuple[str, ...] = ()  # checks that this package's commands cannot run there

    def __str__(self) -> str:
        return f"vLLM {self.version}: {self.outcome.value}: {self.says}"


def main(argv: list[str] | None = None) -> int:
    """Exit 0: nothing new, or no action needed. 1: a maintainer must act. 2: an error."""
    parser = argparse.ArgumentParser(prog="nox -s upstream --", description=__doc__)
    parser.add_argument("--forget", metavar="VERSION", help="as if the table lacked this release")
    parser.add_argument("--no-evidence", action="store_true", help="wheels only: run nothing")
    options = parser.parse_args(argv)
    try:
        news = look(options.forget, run=not options.no_evidence)
    except ProvisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not news:
        print("no release that the table lacks")
    return 1 if any(each.outcome is not Change.UNCHANGED or each.broken for each in news) else 0


def look(forgotten: str | None, *, run: bool) -> list[News]:
    """Compare every release that the matrix lacks; print each result at once."""
    from tools.table import maintain as lane
    from tools.table.derive import code_status, facts

    table, known = lane.MatrixFile(lane.TABLE), load_matrix(ROOT / "compat_matrix.yaml")
    rows = [row for row in known.releases if row.version != forgotten]
    news = []
    for version in [*lane.unlisted(table), *([forgotten] if forgotten else [])]:
        found = facts(version, table.methods)
        native = code_status(lane.open_source(version)) is Status.NATIVE
        judged = judge(version, found["fingerprints"], native, known, rows)
        print(judged, flush=True)
        checks = lane.evidence(version, []) if run else []
        for check in checks:
            print(f"  {check['run']}: {check['result']}", flush=True)
        broken = tuple(broken_checks(checks))
        for line in broken:
            print(f"vLLM {version}: replay broken: {line}", flush=True)
        news.append(replace(judged, broken=broken))
    return news


def broken_checks(checks: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the checks that did not run, each with the call that failed."""
    return [f"{c['run']}: {c['result']}" for c in checks if c["result"].startswith(DOES_NOT_RUN)]


def judge(
    version: str,
    fingerprints: Mapping[str, str],
    native: bool,
    table: Matrix,
    rows: Iterable[Row],
) -> News:
    """Compare one release with the rows.

    Args:
        version: the release.
        fingerprints: of its methods.
        native: whether its `MambaManager` has its own method that frees a range, as the fix does.
        table: names the first release with the fix.
        rows: releases to compare with.
    """
    newest_first = sorted(rows, key=lambda row: Version(row.version), reverse=True)
    like = next((row for row in newest_first if row.fingerprints == fingerprints), None)
    should_be_fixed = Version(version) >= Version(table.fix.first_release)
    if should_be_fixed and not (native or (like and like.status is Status.NATIVE)):
        says = f"no method of the fix, which is in {table.fix.first_release} and newer"
        return News(version, Change.FIX_MISSING, says)
    if like is not None:
        says = f"the methods of {like.version} ({like.status.value})"
        return News(version, Change.UNCHANGED, says)
    nearest = next((r for r in newest_first if Version(r.version) <= Version(version)), None)
    other = nearest.fingerprints if nearest else {}
    names = [n for n in {**other, **fingerprints} if other.get(n) != fingerprints.get(n)]
    since = nearest.version if nearest else "nothing"
    return News(version, Change.CHANGED, f"since {since}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    raise SystemExit(main())
