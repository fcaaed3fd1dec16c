"""compat_matrix.yaml as typed rows: what is known of each vLLM release.

The table is data. Nothing in it is executed, and nothing here looks at the installed vLLM.
The dataclasses below are its schema: a field without a default must be there, and no other may be.
compat_matrix.schema.json says the same to editors and other programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated

from packaging.version import InvalidVersion, Version

from . import strict_yaml

SCHEMA = 1

MatrixError = strict_yaml.TableError

ReleaseNumber = Annotated[str, re.compile(r"\d+(\.\d+){2}")]
Sha256 = Annotated[str, re.compile(r"[0-9a-f]{64}")]
Fingerprint = Annotated[str, re.compile(r"[0-9a-f]{16}")]


class Status(str, Enum):
    """What a release does with old Mamba states in align mode."""

    ABSENT = "absent"  # no align mode
    LATENT = "latent"  # the walk has the flaw, the shipped scheduler does not reach it
    LIVE = "live"  # leaks
    NATIVE = "native"  # carries vllm#55450


class Hook(str, Enum):
    """Where a release's `MambaManager` frees the blocks of a range."""

    INLINE = "inline"  # in a loop of the base's `remove_skipped_blocks`
    INHERITED = "inherited"  # in the base's `_remove_blocks_in_range`
    OWN = "own"  # in a `_remove_blocks_in_range` of its own


@dataclass(frozen=True, slots=True)
class Fix:
    """The upstream change that this package brings to older releases."""

    upstream: str
    merged: date
    first_release: ReleaseNumber


@dataclass(frozen=True, slots=True)
class Product:
    """Another product that is known to touch `MambaManager`.

    Attributes:
        distribution: its name in the registry.
        does: what it does with the class, as the end of a sentence.
    """

    distribution: str
    does: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """One published build of a release."""

    name: str
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Finding:
    """What was run on a release, and what came of it.

    Attributes:
        run: the check.
        result: its result, stock first.
        date: day of the run.
        package: version of this package.
    """

    run: str
    result: str
    date: date
    package: str


@dataclass(frozen=True, slots=True)
class Row:
    """One release.

    Attributes:
        version: release segment.
        status: what it does with old states.
        fingerprints: ``"Class.method"`` -> fingerprint, of those `Matrix.methods` that it defines.
        manager_sha256: of the manager file, the same in every published build.
        hook: where `MambaManager` frees a range; None where there is no align mode.
        cleanup: method of the manager that ends a request's records.
        arguments: of `MambaManager.remove_skipped_blocks`, behind the request id.
        requires_python: as the wheel asks for it.
        torch: the torch that the wheel asks for, as a version specifier.
        imports: distributions that its manager module wants beside the shared ones of the lanes.
        wheels: every published build.
        evidence: what was run on it.
    """

    version: ReleaseNumber
    status: Status
    fingerprints: Mapping[str, Fingerprint]
    manager_sha256: Sha256
    hook: Hook | None = None
    cleanup: str | None = None
    arguments: tuple[str, ...] = ()
    requires_python: str = ""
    torch: str = ""
    imports: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    evidence: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """A file that a series under patches/ changes: its hash before (None: it adds it) and after."""

    release: ReleaseNumber
    file: str
    series: str
    sha256_before: Sha256 | None
    sha256_after: Sha256


@dataclass(frozen=True, slots=True)
class Image:
    """A container image that serves a release.

    Attributes:
        release: the vLLM in it.
        repository: without tag or digest.
        tag: as published.
        accelerator: ``cuda 13.0``, ``rocm``, ...
        architecture: ``amd64`` or ``arm64``.
        digest: ``sha256:...``, where known.
        python: version of the interpreter in it, where known.
        vllm: path of the vLLM package in it, where known.
        evidence: what was run in it; an image without any is untested.
    """

    release: ReleaseNumber
    repository: str
    tag: str
    accelerator: str
    architecture: str
    digest: Annotated[str, re.compile(r"sha256:[0-9a-f]{64}")] | None = None
    python: str | None = None
    vllm: str | None = None
    evidence: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Matrix:
    """The whole table.

    Attributes:
        fix: the upstream change.
        methods: the ``"Class.method"`` names that rows give prints of.
        releases: one row per release, oldest first.
        patches: files that the on-disk series change.
        products: other products that touch the class.
        images: container images.
        schema: version of the table's format.
    """

    fix: Fix
    methods: tuple[str, ...]
    releases: tuple[Row, ...]
    patches: tuple[PatchedFile, ...] = ()
    products: tuple[Product, ...] = ()
    images: tuple[Image, ...] = ()
    schema: int = SCHEMA
    _by_release: dict[tuple[int, ...] | None, Row] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._by_release.update((_release(row.version), row) for row in self.releases)

    def row_for(self, version: str | None) -> Row | None:
        """The row of a version's release segment: ``0.29.0+cu129`` is looked up as 0.29.0."""
        release = _release(version)
        return self._by_release.get(release) if release else None

    def row_like(self, fingerprints: Mapping[str, str], version: str | None) -> Row | None:
        """A row with exactly these fingerprints, the version's own row first."""
        alike = [row for row in self.releases if row.fingerprints == fingerprints]
        own = self.row_for(version)
        return own if own in alike else next(iter(alike), None)

    def series_on(self, manager_sha256: str | None) -> PatchedFile | None:
        """The patch series whose result a manager file with this hash is, if any."""
        return next((file for file in self.patches if file.sha256_after == manager_sha256), None)


def load_matrix(path: Path | None = None) -> Matrix:
    """Read the table.

    Args:
        path: a table; by default the one that came with this package.

    Raises:
        MatrixError: missing, unreadable, malformed or of a newer schema; the message names file,
            line, field and what is wrong.
    """
    document = strict_yaml.Document.open(path or _shipped())
    document.check_schema(SCHEMA)
    matrix = document.read_as(Matrix)
    document.refuse_doubles("releases", [row.version for row in matrix.releases])
    document.refuse_doubles("patches", [f"{f.series} {f.file}" for f in matrix.patches])
    _refuse_unlisted(document, matrix.methods, matrix.releases)
    return matrix


def _refuse_unlisted(
    document: strict_yaml.Document, methods: tuple[str, ...], rows: Iterable[Row]
) -> None:
    for index, row in enumerate(rows):
        for name in row.fingerprints:
            if name not in methods:
                document.refuse(f"{name} is not listed under methods", "releases", index)


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
