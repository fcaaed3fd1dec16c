"""Tar streams of an image, one upon the other: whiteouts, replaced folders, hard links.

A layer is read once, from its beginning to its end, and never unpacked. The rules are those of the
OCI image specification, "Applying Changesets".
"""

from __future__ import annotations

import posixpath
import tarfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO

from .tree import ImageError, Tree, bytes_wanted, clean

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_CHUNK = 1 << 20

Opener = Callable[[], AbstractContextManager[IO[bytes]]]


def put_layer(tree: Tree, open_stream: Opener, where: str) -> None:
    """Put one layer on a tree.

    Args:
        tree: the layers below; changed in place.
        open_stream: gives the uncompressed tar from its beginning, whenever it is called.
        where: names the layer in messages.

    Raises:
        ImageError: truncated, damaged, or an entry leads out of the root.
    """
    wanted: frozenset[str] = frozenset()
    while True:
        upper, links = _read(tree, open_stream, where, wanted)
        missing = {target for target in links.values() if target not in upper.files} - wanted
        missing -= tree.files.keys()
        if not missing:
            break
        # A hard link to a file whose own name did not look interesting: look again for that one.
        wanted |= missing
    for path, target in links.items():
        data = upper.files.get(target, tree.files.get(target))
        if data is None:
            raise ImageError(f"{where}: {path} is a hard link to {target}, which is not there")
        upper.put_file(path, data)
    for path in wanted:
        upper.drop_entry(path)
    tree.cover(upper)


def _read(
    lower: Tree, open_stream: Opener, where: str, wanted: frozenset[str]
) -> tuple[Tree, dict[str, str]]:
    """The layer by itself and its interesting hard links; what it hides is dropped from `lower`."""
    upper = Tree()
    links: dict[str, str] = {}
    try:
        with open_stream() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                path = clean(member.name, where)
                folder, name = posixpath.split(path)
                if name == _OPAQUE:
                    lower.drop_below(folder)
                elif name.startswith(_WHITEOUT):
                    hidden = clean(f"{folder}/{name.removeprefix(_WHITEOUT)}", where)
                    lower.drop(hidden)
                elif member.isdir():
                    lower.drop_entry(path)
                else:
                    lower.drop(path)
                    links.pop(path, None)
                    _keep(upper, links, archive, member, path, where, wanted)
            while stream.read(_CHUNK):
                pass  # so that a checksum sees what is behind the end mark, too
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ImageError(f"{where} is truncated or damaged: {error}") from error
    return upper, links


def _keep(
    upper: Tree,
    links: dict[str, str],
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    where: str,
    wanted: frozenset[str],
) -> None:
    if member.issym():
        upper.put_link(path, member.linkname)
        return
    limit = bytes_wanted(path) or (bytes_wanted("vllm/__init__.py") if path in wanted else 0)
    if member.islnk():
        target = clean(member.linkname, where)
        if limit:
            links[path] = target
    elif member.isfile() and limit:
        opened = archive.extractfile(member)
        assert opened is not None  # only other kinds of members give None
        upper.put_file(path, opened.read(limit))
    else:
        upper.drop(path)
