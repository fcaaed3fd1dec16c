"""What else an operator should know about a tree that gets patched: other trees, pip's records."""

from __future__ import annotations

import base64
import csv
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_mamba_retire.target import MANAGER_FILE


def notes(root: Path) -> Iterator[str]:
    """One sentence for each thing worth knowing."""
    yield from other_trees(root)
    yield from stale_records(root)


def other_trees(root: Path) -> Iterator[str]:
    """Other vLLM trees that this interpreter's path holds; they are not touched."""
    seen = {root}
    for entry in sys.path:
        package = (Path(entry) / "vllm").resolve()
        if (package / MANAGER_FILE).is_file() and package.parent not in seen:
            seen.add(package.parent)
            yield f"another vLLM lies at {package} and is left as it is"


def stale_records(root: Path) -> Iterator[str]:
    """Wheel records beside the tree that list another hash for the manager file."""
    listed = f"vllm/{MANAGER_FILE.as_posix()}"
    data = (root / listed).read_bytes()
    actual = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    for record in sorted(root.glob("vllm*.dist-info/RECORD")):
        with record.open(encoding="utf-8", newline="") as stream:
            hashes = [row[1] for row in csv.reader(stream) if row and row[0] == listed]
        # A record may name a file and leave its hash out.
        if any(hashes) and f"sha256={actual}" not in hashes:
            yield (
                f"{record.parent.name}/RECORD lists the hash of the file as released: pip check "
                "does not look at it, pip uninstall removes the file all the same, and any "
                "reinstall or upgrade of vLLM brings stock code back, so apply again after it"
            )
