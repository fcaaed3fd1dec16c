"""Makes small images: unpacked, as an engine's export, and behind a docker that answers."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire.cli import app

SITE = "usr/lib/python3/dist-packages"
VLLM = f"{SITE}/vllm"
MANAGER = f"{VLLM}/v1/core/single_type_kv_cache_manager.py"
SOURCE = b"class MambaManager:\n    mamba_cache_mode = 'align'\n"
NATIVE_SOURCE = SOURCE + b"    # 0.30.0\n"
# The first bytes of a 64-bit little-endian ELF file, and its machine: x86-64.
AMD64 = b"\x7fELF\x02\x01\x01" + bytes(11) + (62).to_bytes(2, "little") + bytes(44)
ARM64 = b"\x7fELF\x02\x01\x01" + bytes(11) + (183).to_bytes(2, "little") + bytes(44)


@dataclass(frozen=True)
class Link:
    """A symbolic link, or a hard one."""

    to: str
    hard: bool = False


Entries = Mapping[str, "bytes | Link"]

PYTHON: Entries = {"usr/bin/python3": Link("python3.11"), "usr/bin/python3.11": AMD64}


def vllm(version: str = "0.29.0", source: bytes = SOURCE, site: str = SITE) -> dict[str, Any]:
    """The files of a vLLM that tell what it is."""
    return {
        f"{site}/vllm/__init__.py": b"",
        f"{site}/vllm/_version.py": f"__version__ = version = '{version}'\n".encode(),
        f"{site}/vllm/v1/core/single_type_kv_cache_manager.py": source,
        f"{site}/vllm-{version}.dist-info/METADATA": f"Name: vllm\nVersion: {version}\n".encode(),
    }


def native(site: str = SITE) -> dict[str, Any]:
    """The files of a vLLM that carries the fix."""
    return vllm("0.30.0", NATIVE_SOURCE, site)


def own(version: str = "0.1.0", site: str = SITE) -> dict[str, Any]:
    """What pip leaves of this package and of what it imports in a vLLM process."""
    info = f"{site}/vllm_mamba_retire-{version}.dist-info"
    modules = ("vllm_mamba_retire", "msgspec", "packaging", "psutil", "wrapt", "yaml")
    return {
        f"{info}/METADATA": f"Name: vllm-mamba-retire\nVersion: {version}\n".encode(),
        f"{info}/entry_points.txt": b"[vllm.general_plugins]\nmamba_retire = x:y\n",
        **{f"{site}/{name}/__init__.py": b"" for name in modules},
    }


def tarred(entries: Entries | Iterable[tuple[str, bytes | Link]]) -> bytes:
    """A tar as engines export it, entries in order."""
    buffer = io.BytesIO()
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, what in pairs:
            member = tarfile.TarInfo(name)
            if isinstance(what, Link):
                member.type = tarfile.LNKTYPE if what.hard else tarfile.SYMTYPE
                member.linkname = what.to
                tar.addfile(member)
            else:
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
    return buffer.getvalue()


def unpacked(root: Path, entries: Entries) -> Path:
    """A root file system on disk."""
    for name, what in entries.items():
        at = root / name
        at.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(what, Link):
            at.write_bytes(what)
        elif what.hard:
            at.hardlink_to(root / what.to)
        else:
            at.symlink_to(what.to)
    return root


class Docker:
    """A docker that has one image, alone on PATH; it writes down how it is called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def script(self, text: str) -> None:
        """Answer by this shell script."""
        self._script = text
        command = self.folder / "docker"
        command.write_text(f'#!/bin/sh\necho "$@" >> {self.calls_file}\n{text}\n')
        command.chmod(0o755)

    def first(self, text: str) -> None:
        """Run this before the script that is there."""
        self.script(f"{text}\n{self._script}")

    def image(self, exported: bytes, export_code: int = 0, **settings: Any) -> None:
        """Have an image; keyword arguments go into its configuration."""
        about = {"Id": "ab", "Architecture": "amd64", "RepoDigests": ["r@sha256:cd"]}
        (self.folder / "about").write_text(json.dumps([{**about, "Config": settings}]))
        (self.folder / "export").write_bytes(exported)
        self.script(
            f"case $1 in image) cat {self.folder}/about ;; create) echo c0ffee ;;\n"
            f"export) cat {self.folder}/export; exit {export_code} ;; esac"
        )

    def inspected(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON of ``inspect-image`` about the image."""
        line = ["inspect-image", "vllm:test", "--engine=docker", "--json", *arguments]
        done = CliRunner().invoke(app, line)
        return done.exit_code, json.loads(done.stdout)

    @property
    def calls(self) -> list[str]:
        """Its command lines so far."""
        return self.calls_file.read_text().splitlines()
