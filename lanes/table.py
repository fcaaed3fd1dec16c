"""The releases of compat_matrix.yaml as the sessions need them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Release:
    """One published vLLM release and what it does with old states in align mode."""

    version: str
    status: str


def releases() -> list[Release]:
    """Every release in the table, in its order."""
    data = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text())
    return [Release(row["version"], row["status"]) for row in data["releases"]]


def default_releases() -> list[Release]:
    """Those that a plain run tests: all that leak, all that carry the fix, the last one before."""
    rows = releases()
    newest_latent = [row for row in rows if row.status == "latent"][-1:]
    return newest_latent + [row for row in rows if row.status in ("live", "native")]


def edges() -> set[str]:
    """Where a status begins or ends: oldest and newest live release, first and newest native."""
    rows = releases()
    by_status = {
        status: [row.version for row in rows if row.status == status]
        for status in ("live", "native")
    }
    return {versions[end] for versions in by_status.values() for end in (0, -1)}
