"""docker save and OCI archives."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.unit.images.image_making import AMD64, ARM64, MANAGER, PYTHON, layer, oci, saved, vllm
from vllm_mamba_retire.images.archive import read_archive
from vllm_mamba_retire.images.config import this_architecture
from vllm_mamba_retire.images.tree import ImageError


def test_saved_image(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tar", layer(PYTHON), layer(vllm()), Env=["A=b=c"], Cmd=["vllm"])
    config, tree = read_archive(path)
    assert (config.name, config.architecture) == ("local/vllm:test", "amd64")
    assert (config.environment, config.command) == ({"A": "b=c"}, ("vllm",))
    assert config.image_id is not None
    assert config.image_id.startswith("sha256:")
    assert tree.read(MANAGER) is not None


def test_oci_image_with_an_attestation_beside_it(tmp_path: Path) -> None:
    path = oci(tmp_path / "a.tar", {"amd64": [layer(PYTHON), layer(vllm())]}, attested=True)
    config, tree = read_archive(path)
    assert config.digest is not None
    assert config.digest.startswith("sha256:")
    assert tree.read("usr/bin/python3") == AMD64


def test_image_for_several_architectures(tmp_path: Path) -> None:
    both = {
        "amd64": [layer({"usr/bin/python3": AMD64})],
        "arm64": [layer({"usr/bin/python3": ARM64})],
    }
    path = oci(tmp_path / "a.tar", both)
    assert read_archive(path, "arm64")[1].read("usr/bin/python3") == ARM64
    own = read_archive(path)[0].architecture
    assert own == this_architecture()
    with pytest.raises(ImageError, match=r"images for \['amd64', 'arm64'\]; choose"):
        read_archive(path, "s390x")


@pytest.mark.parametrize("kind", ["saved", "oci"])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9])
def test_truncated_archive_is_refused(tmp_path: Path, kind: str, keep: float) -> None:
    # Contents that do not pack, so that the cut is in the middle of the layer.
    noise = layer({"usr/share/noise": random.Random(0).randbytes(100_000), **vllm()})
    path = tmp_path / "a.tar"
    saved(path, noise) if kind == "saved" else oci(path, {"amd64": [noise]})
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ImageError, match=r"truncated|incomplete|damaged"):
        read_archive(path)


def test_layer_of_another_image_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tar", layer(vllm(source=b"one")))
    data = path.read_bytes()
    assert data.count(b"one") == 1
    path.write_bytes(data.replace(b"one", b"two"))
    with pytest.raises(ImageError, match="layer 1 of 1 is truncated or damaged: its hash"):
        read_archive(path)


def test_changed_configuration_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.tar", layer(vllm()))
    path.write_bytes(path.read_bytes().replace(b"amd64", b"arm64"))
    with pytest.raises(ImageError, match=r"the configuration .* is damaged"):
        read_archive(path)


def test_several_images_are_refused_by_name(tmp_path: Path) -> None:
    manifest = [{"RepoTags": ["a:1"]}, {"RepoTags": ["b:2"]}]
    path = tmp_path / "a.tar"
    path.write_bytes(layer({"manifest.json": json.dumps(manifest).encode()}))
    with pytest.raises(ImageError, match=r"2 images \['a:1', 'b:2'\]"):
        read_archive(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated or no tar archive"),
        (b"#!/bin/sh\n" * 200, "truncated or no tar archive"),
        (layer(vllm()), "holds no image"),
        (layer({"manifest.json": b"{"}), "is not JSON"),
        (layer({"manifest.json": b"[{}]"}), "is no image archive"),
        (layer({"index.json": b"[]"}), "is no image archive"),
    ],
    ids=["empty", "text", "rootfs", "broken json", "no config", "list"],
)
def test_what_is_no_image_archive(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=said):
        read_archive(path)


def test_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nowhere\.tar cannot be read: No such file"):
        read_archive(tmp_path / "nowhere.tar")
