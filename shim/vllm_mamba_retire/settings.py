"""What decides, around the vLLM of this interpreter, whether and how its processes get patched.

The vLLM on disk and what the table knows of it, vLLM's rules for plug-ins, and other products that
touch the same class. Reads files and metadata only, works on a broken vLLM, imports none.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from .evidence import collect_evidence
from .names import MODE_VARIABLE, read_mode
from .releases import Matrix, MatrixError, Product, Row, load_matrix
from .target import Target, find_target
from .verdict import Reason, Verdict, decide

DISTRIBUTION = "vllm-mamba-retire"
PLUGIN = "mamba_retire"
_GROUP = "vllm.general_plugins"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another product that touches the class, as it is installed here."""

    product: Product
    version: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One interpreter, and the vLLM that it serves.

    Attributes:
        interpreter: path of the Python.
        python: its version.
        target: the vLLM that it would import, or None.
        verdict: what each of its processes would decide, were nothing in the way.
        row: what the table knows of the release that vLLM calls itself.
        mode: ``MAMBA_RETIRE`` as it is set here.
        obstacle: why vLLM processes started from here would not be patched, and how to mend it.
        neighbours: other products that touch the class.
        shadowed: further vLLM packages on the path, which do not serve.
    """

    interpreter: str
    python: str
    target: Target | None
    verdict: Verdict
    row: Row | None
    mode: str
    obstacle: str | None
    neighbours: tuple[Neighbour, ...]
    shadowed: tuple[Path, ...]

    @property
    def finding(self) -> bool:
        """Whether vLLM may leak here although it should not."""
        return self.verdict.in_doubt or self.obstacle is not None


def judge_files(target: Target | None, matrix: Matrix) -> Verdict:
    """The verdict by the files alone."""
    return decide(collect_evidence(target, matrix))


def look_around(judge: Callable[[Target | None, Matrix], Verdict] = judge_files) -> Surroundings:
    """Look at this interpreter; `forecast.predict` judges as its processes will."""
    target = find_target()
    matrix: Matrix | None = None
    try:
        matrix = load_matrix()
        verdict = judge(target, matrix)
    except MatrixError as error:
        verdict = Verdict(Reason.FAILED, f"{error}; reinstall {DISTRIBUTION}.")
    return Surroundings(
        interpreter=sys.executable,
        python=platform.python_version(),
        target=target,
        verdict=verdict,
        row=matrix.row_for(target.version) if matrix and target else None,
        mode=os.environ.get(MODE_VARIABLE, "auto"),
        obstacle=_obstacle(),
        neighbours=tuple(_neighbours(matrix)) if matrix else (),
        shadowed=tuple(_shadowed(target)) if target else (),
    )


def _obstacle() -> str | None:
    """The first thing that keeps vLLM from loading or obeying this package."""
    mode = os.environ.get(MODE_VARIABLE)
    if read_mode(mode) is None:
        return f"MAMBA_RETIRE={mode} is none of auto, require, off; unset it."
    if not any(_offers_plugin(found) for found in distributions(name=DISTRIBUTION)):
        return (
            f"vLLM finds no entry point {PLUGIN} in {_GROUP}; pip install {DISTRIBUTION} into "
            f"{sys.prefix}."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves this package out; add {PLUGIN}."
    return None


def _offers_plugin(distribution: Distribution) -> bool:
    return any(
        point.group == _GROUP and point.name == PLUGIN for point in distribution.entry_points
    )


def _neighbours(matrix: Matrix) -> Iterator[Neighbour]:
    for product in matrix.products:
        for found in distributions(name=product.distribution):
            yield Neighbour(product, found.version)


def _shadowed(target: Target) -> Iterator[Path]:
    for folder in dict.fromkeys(Path(entry or ".").absolute() for entry in sys.path):
        package = folder / "vllm"
        if (package / "__init__.py").exists() and not _same(package, target.package):
            yield package


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
