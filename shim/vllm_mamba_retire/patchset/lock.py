"""One writer per tree: an advisory lock on the folder that holds ``vllm/``.

The folder itself is locked, so there is no lock file to leave behind; the kernel lets go of the
lock when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the tree's lock.

    Args:
        root: the folder that holds ``vllm/``.
        waiting: called once if another process has the lock; then it is waited for.

    Raises:
        OSError: the folder's file system has no locks.
    """
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
