"""Settings outside vLLM's source that affect patching: installation, plug-in list, mode.

Reads files and metadata only, and works on a broken vLLM. `obstacle` alone decides whether a vLLM
process patches itself: for this interpreter, for another process's environment and for the files of
an image.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path

from .evidence import Evidence, collect_evidence
from .keep_verdict import KeepVerdict, decide_keep, unavailable
from .names import KEEP_VARIABLE, MODE_VARIABLE, read_keep, read_mode
from .releases import Matrix, MatrixError, Product, Row, load_matrix
from .target import Target, distributions_in, field, find_target
from .verdict import Reason, Verdict, decide

DISTRIBUTION = "vllm-mamba-retire"
PACKAGE = "vllm_mamba_retire"
PLUGIN = "mamba_retire"
GROUP = "vllm.general_plugins"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
# What the package imports in a vLLM process; pip install --no-deps leaves them out.
REQUIRED_MODULES = ("msgspec", "packaging", "psutil", "wrapt", "yaml")


@dataclass(frozen=True, slots=True)
class Installed:
    """This package's installation in an interpreter.

    Attributes:
        version: of its distribution; None without metadata.
        entry_point: whether vLLM's plug-in loader finds it.
        missing: modules that a vLLM process needs and that are missing, this package included.
    """

    version: str | None
    entry_point: bool = False
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstalledProduct:
    """Another installed product that changes the class."""

    product: Product
    version: str


@dataclass(frozen=True, slots=True)
class Settings:
    """One interpreter, and the vLLM that it serves.

    Attributes:
        interpreter: path of the Python.
        python: its version.
        target: the vLLM that it would import, or None.
        verdict: the verdict of each of its processes that loads this package.
        row: the matrix's row for the version string of that vLLM.
        mode: ``MAMBA_RETIRE`` as set here.
        keep: ``MAMBA_RETIRE_KEEP`` as set here.
        installed: this package's installation in this interpreter.
        obstacle: why vLLM processes started from here would not be patched, and what to do.
        products: other installed products that change the class.
        shadowed: further vLLM packages on the path, which do not serve.
    """

    interpreter: str
    python: str
    target: Target | None
    verdict: Verdict
    row: Row | None
    mode: str
    keep: str
    installed: Installed
    obstacle: str | None
    products: tuple[InstalledProduct, ...]
    shadowed: tuple[Path, ...]

    @property
    def finding(self) -> bool:
        """Whether vLLM may leak here although this package is installed."""
        return self.verdict.in_doubt or self.obstacle is not None


def judge_files(target: Target | None, matrix: Matrix) -> Verdict:
    """Return the verdict from the files, without running any code."""
    return decide(collect_evidence(target, matrix))


def read_settings(judge: Callable[[Target | None, Matrix], Verdict] = judge_files) -> Settings:
    """Return the settings of this interpreter; the verdict is that of `forecast.predict`."""
    target = find_target()
    matrix: Matrix | None = None
    try:
        matrix = load_matrix()
        verdict = judge(target, matrix)
    except MatrixError as error:
        verdict = Verdict(Reason.FAILED, f"{error}; reinstall {DISTRIBUTION}.")
    installed = find_installed()
    off = read_mode(os.environ.get(MODE_VARIABLE)) == "off"
    return Settings(
        interpreter=sys.executable,
        python=platform.python_version(),
        target=target,
        verdict=verdict,
        row=matrix.row_for(target.version) if matrix and target else None,
        mode=os.environ.get(MODE_VARIABLE) or "auto",
        keep=os.environ.get(KEEP_VARIABLE) or "none",
        installed=installed,
        obstacle=None if off else obstacle(os.environ, installed),
        products=tuple(_products(matrix)) if matrix else (),
        shadowed=tuple(_shadowed(target)) if target else (),
    )


def obstacle(environ: Mapping[str, str], installed: Installed) -> str | None:
    """Return why a vLLM process would not load this package or not patch.

    Args:
        environ: the environment that the process is started with.
        installed: this package's installation in its interpreter.

    Returns:
        The first reason, as a sentence with what to do; None if the verdict on its vLLM decides.
        ``MAMBA_RETIRE=off`` is a reason too; check `names.read_mode` first to tell it apart.
    """
    if installed.version is None:
        return f"{DISTRIBUTION} is not installed beside vLLM; install it there."
    if not installed.entry_point:
        return (
            f"vLLM finds no entry point {PLUGIN} in {GROUP}; reinstall {DISTRIBUTION} beside vLLM."
        )
    if installed.missing:
        return (
            f"{', '.join(installed.missing)} cannot be imported beside vLLM; reinstall "
            f"{DISTRIBUTION} with its dependencies."
        )
    mode = read_mode(value := environ.get(MODE_VARIABLE))
    if mode is None:
        return f"{MODE_VARIABLE}={value} is not auto, require or off; unset it."
    if mode == "off":
        return f"{MODE_VARIABLE}={value} leaves vLLM as it is; unset it."
    allowed = environ.get(PLUGINS_VARIABLE)
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"{PLUGINS_VARIABLE}={allowed} does not list this package; add {PLUGIN}."
    return None


def judge_keep(
    environ: Mapping[str, str], installed: Installed, verdict: Verdict, seen: Evidence
) -> KeepVerdict:
    """Whether a vLLM process would keep the newest states, by the files alone.

    Args:
        environ: the environment that the process is started with.
        installed: this package's installation in its interpreter.
        verdict: the verdict about retirement.
        seen: the evidence that it is based on.
    """
    rule = read_keep(asked := environ.get(KEEP_VARIABLE))
    if read_mode(environ.get(MODE_VARIABLE)) == "off":
        verdict = decide(Evidence(seen.target, off=True))
    elif rule != "none" and (problem := obstacle(environ, installed)) is not None:
        return unavailable(problem.rstrip("."))
    return decide_keep(rule, asked, verdict, seen, None)


def find_installed(path: Sequence[str] | None = None) -> Installed:
    """Find this package in an interpreter.

    Args:
        path: the folders that it imports from, in order; by default those of this interpreter.
    """
    if path is None:
        found = list(distributions(name=DISTRIBUTION))
    else:
        found = list(distributions_in(map(Path, path), f"{PACKAGE}*"))
    # As vLLM's plug-in loader does, which takes the entry points of every copy.
    points = [p for each in found for p in each.entry_points if p.group == GROUP]
    missing = tuple(name for name in (PACKAGE, *REQUIRED_MODULES) if not _spec(name, path))
    return Installed(
        version=field(found[0], "Version") if found else None,
        entry_point=any(point.name == PLUGIN for point in points),
        missing=missing,
    )


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
    except (ImportError, ValueError):  # a stand-in in sys.modules has no spec
        return None
    # A folder without __init__.py is left over from an uninstall.
    return spec if spec is not None and spec.origin is not None else None


def _products(matrix: Matrix) -> Iterator[InstalledProduct]:
    for product in matrix.products:
        for found in distributions(name=product.distribution):
            yield InstalledProduct(product, found.version)


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
