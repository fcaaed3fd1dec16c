"""Reads the releases of compat_matrix.yaml for the sessions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Release:
    """One published vLLM release and what it does with old states in align mode.

    Attributes:
        version: release segment.
        status: what it does with old states.
        imports: distributions that its manager module needs besides the shared ones.
    """

    version: str
    status: str
    imports: tuple[str, ...]


def releases() -> list[Release]:
    """Return every release in the matrix, in its order."""
    data = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text())
    return [
        Release(row["version"], row["status"], tuple(row.get("imports", ())))
        for row in data["releases"]
    ]


def versions(*statuses: str) -> list[str]:
    """Return the versions of the releases with one of these statuses; without any, of all."""
    return [row.version for row in releases() if not statuses or row.status in statuses]


def edges() -> list[str]:
    """Return what a plain run tests: oldest and newest live, first and newest fixed release."""
    return [versions(status)[end] for status in ("live", "native") for end in (0, -1)]


def extra_imports() -> list[str]:
    """Return what manager modules import in addition to the shared requirements."""
    return sorted({name for row in releases() for name in row.imports})
