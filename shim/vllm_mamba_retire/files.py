"""Reads small files that another user may have written: bounded, and regular files only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait


def read_regular(path: Path, limit: int) -> tuple[bytes, os.stat_result]:
    """Content and status of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read, is larger, or is no regular file (a FIFO, a device, a folder).
    """
    with os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(None, "is not a regular file", str(path))
        # One byte more: the size of a file that grows, or of one in /proc, is not known before.
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(None, f"is larger than {limit} bytes", str(path))
    return data, found
