"""Checks compat_matrix.yaml against the published wheels, updates it, or adds a release.

``nox -s matrix`` checks every row; ``-- --write`` writes the results into the file and keeps its
comments and order; ``-- --add 0.34.0`` adds a release and prints what changed in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from tools.env import provision, registry
from tools.env.provision import ROOT, ProvisionError
from tools.table.derive import Facts, code_status, facts
from vllm_mamba_retire import __version__
from vllm_mamba_retire.releases import Status

TABLE = ROOT / "compat_matrix.yaml"
# The fields of a row in the order in which a person reads them.
ORDER = (
    *("version", "status", "hook", "cleanup", "arguments", "requires_python", "torch", "imports"),
    *("manager_sha256", "call_basis", "fingerprints", "wheels", "evidence"),
)
# Up to the next line that is neither empty nor indented.
_RELEASES = re.compile(r"^(releases:\n(?:\n*[ ].*\n)+)", re.MULTILINE)
_OLDEST = Version("0.14.1")  # the last release without align mode


def main(argv: list[str] | None = None) -> int:
    """Exit 0: the matrix agrees with the wheels, or was updated. 1: it differs. 2: an error."""
    options = _options(argv)
    table = MatrixFile(TABLE)
    try:
        if options.add:
            return add(table, options.add)
        return compare(table, options.versions, options.write, not options.no_evidence)
    except ProvisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s matrix --", description=__doc__)
    parser.add_argument("versions", nargs="*", help="releases to look at; by default all")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail on a difference (the default)")
    what.add_argument("--write", action="store_true", help="put what was found into the table")
    what.add_argument("--add", metavar="VERSION", help="add a new upstream release")
    parser.add_argument("--no-evidence", action="store_true", help="wheels only: run nothing")
    return parser.parse_args(argv)


class MatrixFile:
    """The file, with its comments, quotes and order kept.

    Only the list of releases is parsed and written again; the text before and after it is kept byte
    for byte.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.yaml = YAML()
        self.yaml.preserve_quotes = True
        self.yaml.width = 1000
        self.yaml.indent(mapping=2, sequence=4, offset=2)
        self.before, releases, self.behind = _RELEASES.split(path.read_text())
        self.data = self.yaml.load(releases)
        self.methods = tuple(YAML(typ="safe").load(self.before)["methods"])

    @property
    def rows(self) -> list[Any]:
        return list(self.data["releases"])

    def row(self, version: str) -> Any:
        return next(row for row in self.rows if row["version"] == version)

    def put(self, version: str, found: Facts) -> None:
        """Update a row; insert missing fields at their place in `ORDER`."""
        row = self.row(version)
        for field, value in found.items():
            if plain(row.get(field)) == value:
                continue  # its comments and quotes stay
            if field not in row:
                before = ORDER[: ORDER.index(field)]
                row.insert(sum(name in row for name in before), field, None)
            row[field] = styled(field, value)

    def save(self) -> None:
        draft = self.path.with_suffix(".draft")  # nobody reads half a table
        with draft.open("w") as stream:
            stream.write(self.before)
            self.yaml.dump(self.data, stream)
            stream.write(self.behind)
        draft.replace(self.path)


def compare(table: MatrixFile, versions: list[str], write: bool, run: bool) -> int:
    """Compare rows with wheels and runs; with `write`, update them."""
    differences = 0
    for version in versions or [row["version"] for row in table.rows]:
        row = table.row(version)
        found = facts(version, table.methods)
        if row["status"] != Status.LATENT.value:
            del found["call_basis"]  # nothing depends on it there
        if run:
            found["evidence"] = evidence(version, plain(row.get("evidence")) or [])
        for line in differ(plain(row), found):
            print(f"{version} {line}")
            differences += 1
        print(f"{version} looked at", flush=True)
        if write:
            table = MatrixFile(TABLE)  # runs take minutes; somebody may have edited it since
            table.put(version, found)
            table.save()
    if not versions:
        for missing in unlisted(table):
            print(f"{missing} is published and not in the table; add it with --add {missing}")
            differences += 1
    return 1 if differences and not write else 0


def add(table: MatrixFile, version: str) -> int:
    """Add a release after the last row and print how it compares with that row."""
    last = table.rows[-1]
    found = facts(version, table.methods)
    listed = code_status(open_source(version))
    seen = evidence(version, [])
    row = CommentedMap(version=version, status=(listed or behaviour(seen)).value)
    if row["status"] != Status.LATENT.value:
        del found["call_basis"]
    table.data["releases"].append(row)
    table.put(version, {**found, "evidence": seen})
    table.save()
    for line in news(plain(last), plain(row)):
        print(f"{version}: {line}")
    return 0


def news(last: Facts, new: Facts) -> Iterator[str]:
    """Return what a maintainer must check about a new release."""
    if last["status"] == Status.NATIVE.value != new["status"]:
        yield f"the fix is gone: {last['status']} in {last['version']}, {new['status']} here"
    names = sorted({*last["fingerprints"], *new["fingerprints"]})
    changed = [n for n in names if last["fingerprints"].get(n) != new["fingerprints"].get(n)]
    if changed:
        yield f"changed since {last['version']}: {', '.join(changed)}"
    else:
        yield f"the same methods as {last['version']}"
    yield f"status {new['status']}"


def behaviour(seen: list[Facts]) -> Status:
    """Return live or latent: whether the release's own scheduler reaches the defect."""
    scheduler = [entry["result"] for entry in seen if entry["run"].startswith("scheduler")]
    if not scheduler or any("does not run" in result for result in scheduler):
        raise ProvisionError(f"no scheduler replay tells live from latent: {scheduler}")
    # Without speculation two states and one per chunk in flight are needed.
    leaks = any(int(peak) > 4 for peak in scheduler[0].split("stock ")[-1].split(",")[0].split("/"))
    return Status.LIVE if leaks else Status.LATENT


def open_source(version: str) -> str:
    """Return the manager source of a release."""
    return registry.open_build(registry.builds("vllm", version)[0]).manager.decode()


def unlisted(table: MatrixFile) -> list[str]:
    """Return published releases, from the oldest row on, that the matrix lacks."""
    listed = {row["version"] for row in table.rows}
    return [v for v in registry.versions("vllm") if Version(v) >= _OLDEST and v not in listed]


def evidence(version: str, known: list[Facts]) -> list[Facts]:
    """Run the checks on a release; an unchanged result keeps its date and version."""
    path = os.pathsep.join(map(str, (provision.own_package(), provision.release(version), ROOT)))
    child = subprocess.run(
        [str(provision.shared_environment()), "-m", "tools.table.behaviour"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise ProvisionError(f"evidence for {version} failed:\n{child.stderr[-2000:]}")
    before = {(entry["run"], entry["result"]): entry for entry in known}
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return [
        before.get((run, result))
        or {"run": run, "result": result, "date": today, "package": __version__}
        for run, result in json.loads(child.stdout.splitlines()[-1])
    ]


def differ(row: Facts, found: Facts) -> Iterator[str]:
    """Return the fields in which a row differs from the results."""
    for field, value in found.items():
        here = row.get(field)
        if field == "evidence":  # when it was run is no difference
            here, value = _results(here or ()), _results(value)
        if here != value:
            yield f"{field}: the table says {here}, found {value}"


def _results(entries: Iterable[Facts]) -> Any:
    return {entry["run"]: entry["result"] for entry in entries}


def plain(node: Any) -> Any:
    """Convert a node of the file to plain values."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(item) for item in node]
    return str(node) if isinstance(node, str) else node


def styled(field: str, value: Any) -> Any:
    """Convert a value to this file's style: quoted version numbers, short lists on one line."""
    if field == "fingerprints":
        # Ten digits and six letters: one day sixteen digits, which YAML would read as a number.
        return CommentedMap((k, DoubleQuotedScalarString(v)) for k, v in value.items())
    if field in ("requires_python", "torch", "call_basis"):
        return DoubleQuotedScalarString(value)
    if field in ("arguments", "imports"):
        short = CommentedSeq(value)
        short.fa.set_flow_style()
        return short
    return value


if __name__ == "__main__":
    sys.exit(main())
