"""An unpacked root file system: walked without following a single link on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .tree import ImageError, Tree, bytes_wanted

# Not the image's, where somebody looks at the root of a running system.
_KERNEL = {"proc", "sys", "dev"}


def read_rootfs(root: Path) -> Tree:
    """What matters of an unpacked image.

    Raises:
        ImageError: no such folder, or it cannot be read.
    """
    if not root.is_dir():
        raise ImageError(f"{root} is not a folder; give the root of an unpacked image")
    tree = Tree()

    def refuse(error: OSError) -> None:
        raise ImageError(f"{error.filename} cannot be read ({error.strerror}); try as root")

    for folder, names, files, at in os.fwalk(root, onerror=refuse, follow_symlinks=False):
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        if not prefix:
            names[:] = [name for name in names if name not in _KERNEL]
        for name in (*names, *files):
            _keep(tree, prefix + name, name, at)
    return tree


def _keep(tree: Tree, path: str, name: str, folder: int) -> None:
    kind = os.lstat(name, dir_fd=folder).st_mode
    if stat.S_ISLNK(kind):
        tree.put_link(path, os.readlink(name, dir_fd=folder))
    elif stat.S_ISREG(kind) and (limit := bytes_wanted(path)):
        # Opened by the folder's descriptor: nobody can put a link in its place meanwhile.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with os.fdopen(opened, "rb") as file:
            tree.put_file(path, file.read(limit))
