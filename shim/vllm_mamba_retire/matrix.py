"""compat_matrix.yaml as typed rows: what is known of each vLLM release.

The table is data. Nothing in it is executed, and nothing here looks at the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

SCHEMA = 1


class MatrixError(Exception):
    """The table cannot be used; the message names the file, the place and what is wrong."""


class Status(str, Enum):
    """What a release does with old Mamba states in align mode."""

    ABSENT = "absent"  # no align mode
    LATENT = "latent"  # the walk has the flaw, the shipped scheduler does not reach it
    LIVE = "live"  # leaks
    NATIVE = "native"  # carries vllm#55450


@dataclass(frozen=True, slots=True)
class Fix:
    """The upstream change that this package brings to older releases."""

    upstream: str
    merged: str
    first_release: str


@dataclass(frozen=True, slots=True)
class Row:
    """One release: its status and the fingerprints of the methods that the patch leans on."""

    version: str
    status: Status
    fingerprints: Mapping[str, str]
    manager_sha256: str


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """One file that a release's on-disk series changes; no hash before: the series makes it."""

    release: str
    file: str
    series: str
    sha256_before: str | None
    sha256_after: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """The whole table. `methods` are the ``"Class.method"`` names that rows give prints of."""

    fix: Fix
    methods: tuple[str, ...]
    rows: tuple[Row, ...]
    patches: tuple[PatchedFile, ...]

    def row_for(self, version: str | None) -> Row | None:
        """The row of a version's release segment: ``0.29.0+cu129`` is looked up as 0.29.0."""
        release = _release(version)
        return next((row for row in self.rows if _release(row.version) == release), None)

    def row_like(self, fingerprints: Mapping[str, str], version: str | None) -> Row | None:
        """A row with exactly these fingerprints, the version's own row first."""
        alike = [row for row in self.rows if row.fingerprints == fingerprints]
        own = self.row_for(version)
        return own if own in alike else next(iter(alike), None)


def load_matrix(path: Path | None = None) -> Matrix:
    """Read the table.

    Args:
        path: a table; by default the one that came with this package.

    Raises:
        MatrixError: missing, unreadable or malformed.
    """
    path = path or _shipped()
    try:
        with path.open("rb") as stream:
            data = yaml.load(stream, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise MatrixError(f"{path}: {error}") from error
    try:
        return _matrix(data)
    except (KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"{path}: {type(error).__name__}: {error}") from error


def _matrix(data: Any) -> Matrix:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
    return Matrix(
        fix=Fix(
            upstream=data["fix"]["upstream"],
            merged=str(data["fix"]["merged"]),
            first_release=data["fix"]["first_release"],
        ),
        methods=tuple(data["methods"]),
        rows=tuple(
            Row(
                version=row["version"],
                status=Status(row["status"]),
                fingerprints=row["fingerprints"],
                manager_sha256=row["manager_sha256"],
            )
            for row in data["releases"]
        ),
        patches=tuple(PatchedFile(**file) for file in data["patches"]),
    )


def _shipped() -> Path:
    beside = Path(__file__).with_name("compat_matrix.yaml")
    # In a source checkout the table lies at the top.
    return beside if beside.exists() else Path(__file__).parents[2] / "compat_matrix.yaml"


def _release(version: str | None) -> tuple[int, ...] | None:
    try:
        release = Version(version or "").release
    except InvalidVersion:
        return None
    return (*release, 0, 0)[: max(3, len(release))]
