"""Makes image archives as engines write them, and the layers in them, entry by entry."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


FOLDER = None
Entries = Mapping[str, "bytes | Link | None"]

PYTHON: Entries = {"usr/bin/python3": Link("python3.11"), "usr/bin/python3.11": AMD64}


def vllm(version: str = "0.29.0", source: bytes = SOURCE, site: str = SITE) -> Entries:
    """The files of a vLLM that tell what it is."""
    return {
        f"{site}/vllm/__init__.py": b"",
        f"{site}/vllm/_version.py": f"__version__ = version = '{version}'\n".encode(),
        f"{site}/vllm/v1/core/single_type_kv_cache_manager.py": source,
        f"{site}/vllm-{version}.dist-info/METADATA": f"Name: vllm\nVersion: {version}\n".encode(),
    }


def own(version: str = "0.1.0", site: str = SITE) -> Entries:
    """What pip leaves of this package."""
    metadata = f"Name: vllm-mamba-retire\nVersion: {version}\n".encode()
    return {f"{site}/vllm_mamba_retire-{version}.dist-info/METADATA": metadata}


def layer(entries: Entries | Iterable[tuple[str, Any]]) -> bytes:
    """One layer as an uncompressed tar, entries in order."""
    buffer = io.BytesIO()
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, what in pairs:
            member = tarfile.TarInfo(name)
            if what is FOLDER:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            elif isinstance(what, Link):
                member.type = tarfile.LNKTYPE if what.hard else tarfile.SYMTYPE
                member.linkname = what.to
                tar.addfile(member)
            else:
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
    return buffer.getvalue()


def saved(path: Path, *layers: bytes, **settings: Any) -> Path:
    """An archive as ``docker save`` writes it. Keyword arguments go into its configuration."""
    config = _config(layers, "amd64", settings)
    name = f"{_sha(config)}.json"
    paths = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": name, "RepoTags": ["local/vllm:test"], "Layers": paths}]
    files = dict(zip(paths, layers, strict=True)) | {name: config}
    path.write_bytes(layer({"manifest.json": json.dumps(manifest).encode(), **files}))
    return path


def oci(path: Path, images: Mapping[str, Iterable[bytes]], attested: bool = False) -> Path:
    """An OCI archive with gzipped layers, for one or several architectures."""
    blobs: dict[str, bytes] = {}
    entries = [
        _oci_image(blobs, architecture, list(layers)) for architecture, layers in images.items()
    ]
    if attested:
        entries.append({"digest": "sha256:none", "platform": {"architecture": "unknown"}})
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    path.write_bytes(layer({"oci-layout": b"{}", "index.json": index, **blobs}))
    return path


def unpacked(root: Path, entries: Entries) -> Path:
    """A root file system on disk."""
    for name, what in entries.items():
        at = root / name
        at.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, Link):
            at.symlink_to(what.to)
        elif what is not None:
            at.write_bytes(what)
    return root


def _oci_image(blobs: dict[str, bytes], architecture: str, layers: list[bytes]) -> dict[str, Any]:
    def put(data: bytes, kind: str) -> dict[str, Any]:
        blobs[f"blobs/sha256/{_sha(data)}"] = data
        return {"mediaType": kind, "digest": f"sha256:{_sha(data)}", "size": len(data)}

    packed = [
        put(gzip.compress(data, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip")
        for data in layers
    ]
    config = put(_config(layers, architecture, {}), "application/vnd.oci.image.config.v1+json")
    manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": packed}).encode()
    entry = put(manifest, "application/vnd.oci.image.manifest.v1+json")
    return entry | {"platform": {"os": "linux", "architecture": architecture}}


def _config(layers: Iterable[bytes], architecture: str, settings: Mapping[str, Any]) -> bytes:
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{_sha(data)}" for data in layers]}
    about = {"architecture": architecture, "os": "linux", "config": settings, "rootfs": rootfs}
    return json.dumps(about).encode()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
