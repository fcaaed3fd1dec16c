"""Reads compat_matrix.yaml, the facts about each vLLM release, as typed rows.

The matrix is data: nothing in it is executed, and this module does not read the installed vLLM. The
structs below are its schema: a field without a default is required, an unknown one is refused.
compat_matrix.schema.json has the same schema for editors and other programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import yaml
from msgspec import Meta, Struct, ValidationError, convert
from packaging.version import InvalidVersion, Version

SCHEMA = 1

ReleaseNumber = Annotated[str, Meta(pattern=r"^\d+(\.\d+){2}$")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]


class MatrixError(Exception):
    """The matrix cannot be used; the message names file, field and what is wrong."""


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


class Fix(Struct, frozen=True, forbid_unknown_fields=True):
    """The upstream change that this package brings to older releases."""

    upstream: str
    merged: date
    first_release: ReleaseNumber


class Product(Struct, frozen=True, forbid_unknown_fields=True):
    """Another product that is known to touch `MambaManager`.

    Attributes:
        distribution: its name in the registry.
        does: what it does with the class, as the end of a sentence.
    """

    distribution: str
    does: str


class Wheel(Struct, frozen=True, forbid_unknown_fields=True):
    """One published build of a release."""

    name: str
    sha256: Sha256


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """A check that was run on a release, and its result.

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


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One release.

    Attributes:
        version: release segment.
        status: what it does with old states.
        fingerprints: ``"Class.method"`` -> fingerprint, of those `Matrix.methods` that it defines.
        manager_sha256: of the manager file, the same in every published build.
        call_basis: fingerprint of the arguments that its callers pass to `remove_skipped_blocks`,
            for latent releases, where these arguments avoid the defect.
        hook: where `MambaManager` frees a range; None without align mode.
        cleanup: method of the manager that is called when a request ends.
        arguments: of `MambaManager.remove_skipped_blocks`, after the request id.
        requires_python: the wheel's ``Requires-Python``.
        torch: the torch that the wheel requires, as a version specifier.
        imports: distributions that its manager module needs besides those that the test sessions
            share.
        wheels: every published build.
        evidence: the checks that were run on it.
    """

    version: ReleaseNumber
    status: Status
    fingerprints: Mapping[str, Fingerprint]
    manager_sha256: Sha256
    call_basis: Fingerprint | None = None
    hook: Hook | None = None
    cleanup: str | None = None
    arguments: tuple[str, ...] = ()
    requires_python: str = ""
    torch: str = ""
    imports: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    evidence: tuple[Finding, ...] = ()


class PatchedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file that a series under patches/ changes, and its hash before and after."""

    release: ReleaseNumber
    file: str
    series: str
    sha256_before: Sha256
    sha256_after: Sha256


class Image(Struct, frozen=True, forbid_unknown_fields=True):
    """A container image that serves a release.

    Attributes:
        release: the vLLM in it.
        repository: without tag or digest.
        tag: as published.
        accelerator: ``cuda 13.0``, ``rocm``, ...
        architecture: ``amd64`` or ``arm64``.
        digest: ``sha256:...``, if known.
        python: version of the interpreter in it, if known.
        vllm: path of the vLLM package in it, if known.
        evidence: the checks that were run in it; an image without any is untested.
    """

    release: ReleaseNumber
    repository: str
    tag: str
    accelerator: str
    architecture: str
    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    python: str | None = None
    vllm: str | None = None
    evidence: tuple[Finding, ...] = ()


class Matrix(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole matrix.

    Attributes:
        schema: version of its format.
        fix: the upstream change.
        methods: the ``"Class.method"`` names that are fingerprinted.
        releases: one row per release, oldest first.
        patches: the file that each on-disk series changes.
        products: other products that touch the class.
        images: container images.
    """

    schema: Literal[1]
    fix: Fix
    methods: tuple[str, ...]
    releases: tuple[Row, ...]
    patches: tuple[PatchedFile, ...] = ()
    products: tuple[Product, ...] = ()
    images: tuple[Image, ...] = ()

    def row_for(self, version: str | None) -> Row | None:
        """Return the row of a version's release segment (0.29.0 for ``0.29.0+cu129``), or None."""
        release = _release(version)
        return next((r for r in self.releases if release and _release(r.version) == release), None)

    def row_like(self, fingerprints: Mapping[str, str], version: str | None) -> Row | None:
        """Return a row with exactly these fingerprints, the version's own row first, or None."""
        alike = [row for row in self.releases if row.fingerprints == fingerprints]
        own = self.row_for(version)
        return own if own in alike else next(iter(alike), None)

    def series_on(self, manager_sha256: str | None) -> PatchedFile | None:
        """Return the name of the series that produces a manager file with this hash, or None."""
        return next((file for file in self.patches if file.sha256_after == manager_sha256), None)


def load_matrix(path: Path | None = None) -> Matrix:
    """Read the matrix.

    Args:
        path: a file of this format; by default the one that is installed with this package.

    Raises:
        MatrixError: missing, unreadable, malformed or of another schema.
    """
    path = path or _shipped()
    # libyaml's parser takes a tenth of the time; PyYAML may be built without it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = yaml.load(path.read_bytes(), Loader=loader)  # noqa: S506
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise MatrixError(
                f"{path}: schema: {schema} is newer than {SCHEMA}; update this package"
            )
        return convert(data, Matrix)
    except OSError as error:
        raise MatrixError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        what, _, field = str(error).partition(" - at ")
        raise MatrixError(f"{path}: {field.strip('`$.') or 'top level'}: {what}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise MatrixError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _shipped() -> Path:
    beside = Path(__file__).with_name("compat_matrix.yaml")
    # In a source checkout the file is at the top.
    return beside if beside.exists() else Path(__file__).parents[2] / "compat_matrix.yaml"


def _release(version: str | None) -> tuple[int, ...] | None:
    try:
        release = Version(version or "").release
    except InvalidVersion:
        return None
    return (*release, 0, 0)[: max(3, len(release))]
