"""``docker save``, ``podman save`` and OCI archives, read where they lie.

The image's id is the hash of its configuration, which lists the hash of every layer; both are
checked, so that what is reported about an id is true of it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from .config import Config, this_architecture
from .layers import put_layer
from .tree import ImageError, Tree

_DOCUMENT_LIMIT = 16 << 20  # bytes of a manifest or configuration
_INDEXES = ("application/vnd.oci.image.index.v1+json", "manifest.list.v2+json")


def read_archive(path: Path, architecture: str | None = None) -> tuple[Config, Tree]:
    """What matters of an image archive.

    Args:
        path: the tar file.
        architecture: which one to take of an image for several; by default this machine's.

    Raises:
        ImageError: not an image archive, truncated, damaged, or it leads out of its root.
    """
    try:
        with tarfile.open(path) as opened:
            return _Archive(path, opened).read(architecture)
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ImageError(f"{path} is truncated or no tar archive: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{path} is no image archive: {error!r} in its manifests") from error


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where the pieces of one image are in the archive."""

    name: str
    config: str
    layers: Sequence[str]
    digest: str | None


class _Archive:
    def __init__(self, path: Path, opened: tarfile.TarFile) -> None:
        self.path = path
        self.opened = opened
        self.members = {member.name.removeprefix("./"): member for member in opened}

    def read(self, architecture: str | None) -> tuple[Config, Tree]:
        if "manifest.json" in self.members:
            parts = self._saved()
        elif "index.json" in self.members:
            parts = self._oci(architecture)
        else:
            raise ImageError(
                f"{self.path} holds no image: neither manifest.json nor index.json; make it with "
                "`docker save` or `podman save`"
            )
        text = self._bytes(parts.config)
        about = _json(text, f"{self.path}: {parts.config}")
        image_id = f"sha256:{hashlib.sha256(text).hexdigest()}"
        if image_id.removeprefix("sha256:") not in parts.config:
            raise ImageError(f"{self.path}: the configuration {parts.config} is damaged")
        sums = (about.get("rootfs") or {}).get("diff_ids") or []
        if len(sums) != len(parts.layers):
            raise ImageError(f"{self.path} has {len(parts.layers)} layers for {len(sums)} hashes")
        tree = Tree()
        for number, (layer, expected) in enumerate(zip(parts.layers, sums, strict=True), 1):
            where = f"{self.path}: layer {number} of {len(sums)}"
            put_layer(tree, partial(self._layer, layer, expected, where), where)
        return Config.of(parts.name, about, image_id=image_id, digest=parts.digest), tree

    def _saved(self) -> _Parts:
        images = _json(self._bytes("manifest.json"), f"{self.path}: manifest.json")
        if not isinstance(images, list) or len(images) != 1:
            names = [tag for image in images for tag in image.get("RepoTags") or ["?"]]
            raise ImageError(f"{self.path} holds {len(images)} images {names}; save the one alone")
        (image,) = images
        name = next(iter(image.get("RepoTags") or ()), str(self.path))
        return _Parts(name, image["Config"], image["Layers"], None)

    def _oci(self, architecture: str | None) -> _Parts:
        entry = self._choose(_json(self._bytes("index.json"), "index.json"), architecture)
        name = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        manifest = self._blob(entry)
        while entry.get("mediaType", "").endswith(_INDEXES):
            entry = self._choose(manifest, architecture)
            manifest = self._blob(entry)
        layers = [_blob_path(layer) for layer in manifest["layers"]]
        config = _blob_path(manifest["config"])
        return _Parts(name or str(self.path), config, layers, entry["digest"])

    def _choose(self, index: dict[str, Any], architecture: str | None) -> dict[str, Any]:
        # Attestations lie beside images, as for an unknown platform.
        entries: list[dict[str, Any]] = [
            entry
            for entry in index.get("manifests") or []
            if (entry.get("platform") or {}).get("architecture") != "unknown"
        ]
        if len(entries) == 1:
            return entries[0]
        wanted = architecture or this_architecture()
        there = [(entry.get("platform") or {}).get("architecture") for entry in entries]
        if there.count(wanted) != 1:
            raise ImageError(f"{self.path} holds images for {there}; choose with --architecture")
        return entries[there.index(wanted)]

    def _blob(self, entry: dict[str, Any]) -> Any:
        text = self._bytes(_blob_path(entry))
        if f"sha256:{hashlib.sha256(text).hexdigest()}" != entry["digest"]:
            raise ImageError(f"{self.path}: the manifest {entry['digest']} is damaged")
        return _json(text, f"{self.path}: {entry['digest']}")

    def _bytes(self, name: str) -> bytes:
        with self._open(name) as stream:
            return stream.read(_DOCUMENT_LIMIT)

    def _open(self, name: str) -> IO[bytes]:
        try:
            stream = self.opened.extractfile(self.members[name])
        except KeyError:
            stream = None
        if stream is None:
            raise ImageError(f"{self.path} is incomplete: {name} is not in it; save it again")
        return stream

    @contextmanager
    def _layer(self, name: str, expected: str, where: str) -> Iterator[IO[bytes]]:
        with self._open(name) as packed:
            summed = _Summed(_unpacked(packed, where))
            yield summed  # type: ignore[misc]
            if f"sha256:{summed.sum.hexdigest()}" != expected:
                raise ImageError(f"{where} is truncated or damaged: its hash is not {expected}")


class _Summed(io.RawIOBase):
    """Hashes what is read through it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.sum.update(data)
        return data


def _unpacked(stream: IO[bytes], where: str) -> IO[bytes]:
    magic = stream.read(4)
    stream.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        return _unpacked_zstd(stream, where)
    return stream


def _unpacked_zstd(stream: IO[bytes], where: str) -> IO[bytes]:
    opened: IO[bytes]
    try:
        if sys.version_info >= (3, 14):
            opened = import_module("compression.zstd").open(stream)
        else:
            opened = import_module("zstandard").ZstdDecompressor().stream_reader(stream)
    except ImportError:
        raise ImageError(f"{where} is packed with zstd; install zstandard beside this") from None
    return opened


def _blob_path(entry: dict[str, Any]) -> str:
    return "blobs/" + str(entry["digest"]).replace(":", "/", 1)


def _json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ImageError(f"{where} is not JSON: {error}") from error
