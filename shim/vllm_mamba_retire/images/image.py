"""Reads an image: its configuration, and the few files that decide which vLLM serves.

Paths are text relative to the image's root, without a leading slash. Links are followed as in a
process whose root is the image: ``..`` at the root stays there, an absolute target begins there.
Nothing of an image is executed, and the memory that its files take is bounded.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from vllm_mamba_retire.settings import PACKAGE, REQUIRED_MODULES
from vllm_mamba_retire.target import CALLER_FILES

VLLM_FILES = (
    "__init__.py",
    "_version.py",
    "config.py",
    "config/__init__.py",
    "config/cache.py",
    "config/cache.pyc",
    "v1/core/single_type_kv_cache_manager.py",
    "v1/core/single_type_kv_cache_manager.pyc",
    *map(str, CALLER_FILES),
)
MODULE_FILES = tuple(f"{name}/__init__.py" for name in (PACKAGE, *REQUIRED_MODULES))
METADATA_FILES = ("METADATA", "PKG-INFO", "top_level.txt", "entry_points.txt")

_FILE_LIMIT = 4 << 20  # bytes; vLLM's manager file has 70 KiB
_TOTAL_LIMIT = 256 << 20  # bytes of contents, paths and link targets
_HEADER_LIMIT = 1 << 20  # bytes of a tar header: two paths and the extended attributes
_ENTRY = 200  # bytes that an entry takes beside its texts
_MAX_LINKS, _MAX_PATH = 40, 4096  # as in Linux
_SCRIPT_HEAD = 512  # bytes: an ELF header, or a #! line and the one after it
_KERNEL_FOLDERS = {"proc", "sys", "dev"}  # not the image's in the root of a running system

_FILES = re.compile(
    rf"(^|/)(vllm/({'|'.join(map(re.escape, VLLM_FILES))})|{'|'.join(map(re.escape, MODULE_FILES))}"
    rf"|vllm[^/]*\.(dist|egg)-info/({'|'.join(map(re.escape, METADATA_FILES))})"
    r"|(site|dist)-packages/[^/]+\.pth|pyvenv\.cfg)$|^etc/passwd$"
)
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_UNUSED = (tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE)  # engines do not write them
_INTERPRETER = re.compile(r"(^|/)python(3(\.\d+)?)?$")


class ImageError(Exception):
    """An image cannot be read; the message names it, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Config:
    """The part of an image's configuration that decides which vLLM serves.

    Attributes:
        name: as the user gave it.
        image_id: digest of the configuration; None for a root file system.
        digest: of the manifest, where known.
        architecture: in the image's spelling (``amd64``); None for a root file system.
        environment: variables that its processes start with.
        command: entry point and arguments; empty for a root file system.
        folder: where its processes start, relative to the root.
        user: name or number of the user, optionally with a group; empty means root.
    """

    name: str
    image_id: str | None = None
    digest: str | None = None
    architecture: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folder: str = ""
    user: str = ""


class Root:
    """The files of an image that decide which vLLM serves, and all of its links.

    Attributes:
        files: contents by path; of an executable, the first bytes.
        links: targets of links by path. A hard link is one to the first name of its file.
    """

    def __init__(self, command: str = "") -> None:
        """`command`: the executable that the image starts; its first bytes are kept too."""
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self._command = posixpath.basename(command)
        self._names: dict[str, set[str]] = {}
        self._size = 0

    def bytes_wanted(self, path: str) -> int:
        """Return how many bytes of a file to keep: 0 for most files of an image."""
        name = posixpath.basename(path)
        if is_interpreter(name) or name in ("vllm", self._command):
            return _SCRIPT_HEAD
        return _FILE_LIMIT if _FILES.search(path) else 0

    def put_file(self, path: str, data: bytes) -> None:
        """Keep a file."""
        self._count(path, len(data))
        self.files[path] = data

    def put_link(self, path: str, target: str) -> None:
        """Keep a symbolic link; skip one that Linux could not hold."""
        if len(target) < _MAX_PATH:
            self._count(path, len(target))
            self.links[path] = target

    def put_hard_link(self, path: str, first: str) -> None:
        """Keep another name of a file or of a symbolic link."""
        self.put_link(path, self.links.get(first, f"/{first}"))

    def resolve(self, path: str) -> str | None:
        """Follow links as the kernel does; the path may not exist. None for a loop."""
        done: list[str] = []
        rest = path.split("/")[::-1] if len(path) < _MAX_PATH else []
        followed = 0 if rest else _MAX_LINKS + 1
        while rest and followed <= _MAX_LINKS:
            part = rest.pop()
            if part == "..":
                del done[-1:]
            elif part not in ("", "."):
                target = self.links.get("/".join((*done, part)))
                if target is None:
                    done.append(part)
                    continue
                followed += 1
                rest += target.split("/")[::-1]
                if target.startswith("/"):
                    done = []
        return "/".join(done) if followed <= _MAX_LINKS else None

    def read(self, path: str) -> bytes | None:
        """Return a file's contents, links followed; None if it does not exist or is not kept."""
        found = self.resolve(path)
        return None if found is None else self.files.get(found)

    def text(self, path: str) -> str:
        """Return the contents as text; empty if there is no such file."""
        return (self.read(path) or b"").decode("utf-8", "replace")

    def names_in(self, folder: str) -> list[str]:
        """Sorted names of the entries of a folder that were kept."""
        found = self.resolve(folder)
        return sorted(self._names.get(found, ())) if found is not None else []

    def _count(self, path: str, size: int) -> None:
        self._size += size
        while path:
            folder, name = posixpath.split(path)
            names = self._names.setdefault(folder, set())
            if name in names:
                break
            names.add(name)
            self._size += len(path) + _ENTRY
            path = folder
        if self._size > _TOTAL_LIMIT:
            raise ImageError(f"more than {_TOTAL_LIMIT >> 20} MiB of links and vLLM files")


def is_interpreter(name: str) -> bool:
    """Whether a file has the name of a Python interpreter."""
    return _INTERPRETER.search(name) is not None


def read_rootfs(folder: Path) -> Root:
    """Read an unpacked image; no link is followed on this machine.

    Raises:
        ImageError: the folder is no root file system, or cannot be read.
    """
    if not folder.is_dir():
        raise ImageError(f"{folder} is not a folder; `podman load -i {folder}` reads an archive")
    if (folder / "oci-layout").exists():
        raise ImageError(
            f"{folder} is an OCI layout, not a root file system; `podman pull oci:{folder}`, then "
            "name the image"
        )
    root = Root()
    first: dict[tuple[int, int], str] = {}
    folders = [""]
    try:
        while folders:
            inside = folders.pop()
            with os.scandir(folder / inside) as entries:
                for entry in entries:
                    path = f"{inside}/{entry.name}" if inside else entry.name
                    if entry.is_symlink():
                        root.put_link(path, str(Path(entry.path).readlink()))
                    elif entry.is_dir() and path not in _KERNEL_FOLDERS:
                        folders.append(path)
                    elif limit := root.bytes_wanted(path):
                        _read_file(root, path, entry.path, limit, first)
    except OSError as error:
        told = f"{error.filename or folder} cannot be read ({error.strerror})"
        raise ImageError(f"{told}; try as root" if error.errno == errno.EACCES else told) from error
    return root


def _read_file(
    root: Root, path: str, real: str, limit: int, first: dict[tuple[int, int], str]
) -> None:
    # A link or FIFO put here meanwhile is neither followed nor waited for.
    with os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        known = first.setdefault((about.st_dev, about.st_ino), path)
        if known != path:
            root.put_hard_link(path, known)
        elif stat.S_ISREG(about.st_mode):
            root.put_file(path, _limited(file, limit, path))


def read_tar(root: Root, stream: IO[bytes], wanted: frozenset[str] = frozenset()) -> frozenset[str]:
    """Read an engine's export of a container.

    Args:
        root: receives the files to keep.
        stream: the tar, uncompressed.
        wanted: paths to keep in addition to those that `Root.bytes_wanted` selects.

    Returns:
        Paths that hard links need and that were not kept; pass them as `wanted` to a second call.

    Raises:
        ImageError: truncated, damaged, or larger than what is kept of an image.
    """
    missing = set()
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else every header stays in memory
                path = _inside(member.name)
                limit = root.bytes_wanted(path) or (_FILE_LIMIT if path in wanted else 0)
                if member.issym():
                    root.put_link(path, member.linkname)
                elif member.islnk():
                    target = _inside(member.linkname)
                    if limit or target in root.links:
                        root.put_hard_link(path, target)
                        if target not in root.links and target not in root.files:
                            missing.add(target)
                elif limit and (file := archive.extractfile(member)) is not None:
                    root.put_file(path, _limited(file, limit, path))
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as error:
        raise ImageError(f"the export is truncated or damaged: {error}") from error
    return frozenset(missing)


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Refuse headers that `tarfile` would read into memory whatever their size."""
        member = super().frombuf(buf, encoding, errors)
        if member.type in _UNUSED or (member.type in _EXTENDED and member.size > _HEADER_LIMIT):
            raise ImageError(
                f"the export has a header of {member.size} bytes, of a kind or size "
                "that no engine writes"
            )
        return member


def _inside(path: str) -> str:
    return posixpath.normpath(f"/{path}").lstrip("/")


def _limited(file: IO[bytes], limit: int, path: str) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit == _FILE_LIMIT:
        raise ImageError(f"/{path} has more than {limit >> 20} MiB; no vLLM has such a file")
    return data[:limit]
