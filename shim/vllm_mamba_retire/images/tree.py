"""The few files of an image that tell which vLLM serves, and all of its links.

Paths are text relative to the image's root, without a leading slash. A `Tree` follows links as the
image's own kernel would, and refuses those that leave the root: what lies behind is not the
image's.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_MAX_LINKS = 40  # Linux gives up at the same number
_TEXT_LIMIT = 4 << 20  # bytes; vLLM's manager file has 70 KiB
_HEADER = 64  # bytes of an ELF header

_TEXTS = re.compile(
    r"(^|/)("
    r"vllm/(__init__|_version|config|config/__init__|config/cache)\.py"
    r"|vllm/config/cache\.pyc"
    r"|vllm/v1/core/single_type_kv_cache_manager\.pyc?"
    r"|vllm[^/]*\.(dist-info|egg-info)/(METADATA|PKG-INFO|top_level\.txt)"
    r"|(site|dist)-packages/[^/]+\.pth"
    r"|pyvenv\.cfg"
    r"|bin/vllm"
    r")$"
)
_INTERPRETER = re.compile(r"(^|/)bin/python(\d(\.\d+)?)?$")


class ImageError(Exception):
    """An image cannot be read; the message names it, what is wrong and what to do."""


def bytes_wanted(path: str) -> int:
    """How much of a file is worth keeping: 0 for nearly all of an image."""
    if _INTERPRETER.search(path):
        return _HEADER
    return _TEXT_LIMIT if _TEXTS.search(path) else 0


def is_interpreter(path: str) -> bool:
    """Whether a path is named as a Python is."""
    return _INTERPRETER.search(path) is not None


def clean(path: str, where: str) -> str:
    """A member's path, relative to the root.

    Raises:
        ImageError: it leads out of the root.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ImageError(f"{where}: the entry {path} leads out of the root; do not use this image")
    return "/".join(parts)


@dataclass
class Tree:
    """What was kept of an image.

    Attributes:
        files: contents by path, or the first bytes of an interpreter.
        links: targets of symbolic links, as they are written.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    _folders: Counter[str] = field(default_factory=Counter)  # and how many entries are below each

    def put_file(self, path: str, data: bytes) -> None:
        """Keep a file; it takes the place of what was there."""
        self.drop(path)
        self.files[path] = data
        self._folders.update(_parents(path))

    def put_link(self, path: str, target: str) -> None:
        """Keep a symbolic link; it takes the place of what was there."""
        self.drop(path)
        self.links[path] = target
        self._folders.update(_parents(path))

    def drop_entry(self, path: str) -> None:
        """Forget a file or link, not what is below a folder."""
        for entries in (self.files, self.links):
            if path in entries:
                del entries[path]
                self._folders.subtract(_parents(path))

    def drop_below(self, folder: str) -> None:
        """Forget all that is below a folder."""
        if folder and self._folders[folder] <= 0:
            return
        prefix = f"{folder}/" if folder else ""
        for path in [p for p in (*self.files, *self.links) if p.startswith(prefix)]:
            self.drop_entry(path)

    def drop(self, path: str) -> None:
        """Forget a path and all below."""
        self.drop_entry(path)
        self.drop_below(path)

    def cover(self, upper: Tree) -> None:
        """Put another tree on top."""
        for path, data in upper.files.items():
            self.put_file(path, data)
        for path, target in upper.links.items():
            self.put_link(path, target)

    def resolve(self, path: str) -> str:
        """The path that the kernel ends at, every link followed.

        Raises:
            ImageError: a link leads out of the root, or links lead in a circle.
        """
        done: list[str] = []
        rest = _split(path)
        followed = 0
        while rest:
            part = rest.pop(0)
            if part == "..":
                if not done:
                    raise ImageError(f"/{path} leads out of the root through a link")
                done.pop()
                continue
            here = "/".join([*done, part])
            target = self.links.get(here)
            if target is None:
                done.append(part)
                continue
            followed += 1
            if followed > _MAX_LINKS:
                raise ImageError(f"/{path} leads through a circle of links")
            rest = _split(target) + rest
            if target.startswith("/"):
                done = []
        return "/".join(done)

    def read(self, path: str) -> bytes | None:
        """Contents of a file, links followed; None where there is none, or it was not kept.

        Raises:
            ImageError: a link on the way leads out of the root.
        """
        return self.files.get(self.resolve(path))

    def text(self, path: str) -> str:
        """Contents as text; empty where there is no such file."""
        return (self.read(path) or b"").decode("utf-8", "replace")

    def names_in(self, folder: str) -> Iterator[str]:
        """Names of the entries of a folder that were kept, links in its own path followed."""
        prefix = self.resolve(folder) + "/"
        below = (p.removeprefix(prefix) for p in (*self.files, *self.links) if p.startswith(prefix))
        yield from dict.fromkeys(name.split("/", 1)[0] for name in below)


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path
