"""Layers one upon the other: what hides what, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from tests.unit.images.image_making import FOLDER, MANAGER, Link, layer, vllm
from vllm_mamba_retire.images.layers import put_layer
from vllm_mamba_retire.images.tree import ImageError, Tree


def stacked(*layers: bytes) -> Tree:
    tree = Tree()
    for data in layers:

        @contextmanager
        def opened(data: bytes = data) -> Iterator[IO[bytes]]:
            yield io.BytesIO(data)

        put_layer(tree, opened, "layer")
    return tree


def test_later_layer_wins() -> None:
    tree = stacked(layer({MANAGER: b"old"}), layer({MANAGER: b"new"}))
    assert tree.read(MANAGER) == b"new"


def test_only_what_tells_which_vllm_serves_is_kept() -> None:
    tree = stacked(layer({**vllm(), "usr/bin/bash": b"x" * 100, "a/vllm/engine/llm.py": b""}))
    assert set(tree.files) == set(vllm())


def test_whiteout_hides_a_file_of_a_lower_layer() -> None:
    folder, name = MANAGER.rsplit("/", 1)
    tree = stacked(layer({MANAGER: b"old"}), layer({f"{folder}/.wh.{name}": b""}))
    assert tree.read(MANAGER) is None


def test_whiteout_hides_a_whole_folder() -> None:
    tree = stacked(layer(vllm()), layer({"usr/lib/.wh.python3": b""}))
    assert not tree.files


@pytest.mark.parametrize("whiteout_first", [True, False])
def test_whiteout_spares_its_own_layer(whiteout_first: bool) -> None:
    folder, name = MANAGER.rsplit("/", 1)
    entries = [(f"{folder}/.wh.{name}", b""), (MANAGER, b"new")]
    upper = layer(entries if whiteout_first else reversed(entries))
    assert stacked(layer({MANAGER: b"old"}), upper).read(MANAGER) == b"new"


@pytest.mark.parametrize("whiteout_first", [True, False])
def test_opaque_folder_hides_what_lower_layers_put_into_it(whiteout_first: bool) -> None:
    entries = [("usr/lib/.wh..wh..opq", b""), (MANAGER, b"new")]
    upper = layer(entries if whiteout_first else reversed(entries))
    tree = stacked(layer({**vllm(), **vllm(site="opt/site-packages")}), upper)
    assert tree.read(MANAGER) == b"new"
    assert tree.read("usr/lib/python3/dist-packages/vllm/_version.py") is None
    assert tree.read("opt/site-packages/vllm/_version.py") is not None


def test_file_in_the_place_of_a_folder_hides_it() -> None:
    tree = stacked(layer(vllm()), layer({"usr/lib/python3": b"not a folder"}))
    assert not tree.files


def test_folder_in_the_place_of_a_link_unlinks() -> None:
    lower = layer({"opt/a/vllm/__init__.py": b"a", "srv": Link("opt/a")})
    tree = stacked(lower, layer({"srv": FOLDER, "srv/vllm/__init__.py": b"b"}))
    assert tree.read("srv/vllm/__init__.py") == b"b"
    assert tree.read("opt/a/vllm/__init__.py") == b"a"


def test_folder_again_in_an_upper_layer_keeps_its_files() -> None:
    tree = stacked(layer({MANAGER: b"old"}), layer({"usr": FOLDER, "usr/lib": FOLDER}))
    assert tree.read(MANAGER) == b"old"


def test_hard_link_has_the_contents_of_a_file_that_did_not_look_interesting() -> None:
    # As installers link from a cache that names files by their hash.
    data = layer({"cache/ab12": b"source", MANAGER: Link("cache/ab12", hard=True)})
    tree = stacked(data)
    assert tree.read(MANAGER) == b"source"
    assert set(tree.files) == {MANAGER}


def test_hard_link_into_a_lower_layer() -> None:
    tree = stacked(
        layer({MANAGER: b"source"}),
        layer({f"opt/site-packages/{MANAGER}": Link(MANAGER, hard=True)}),
    )
    assert tree.read(f"opt/site-packages/{MANAGER}") == b"source"


def test_hard_link_to_nothing_is_refused() -> None:
    with pytest.raises(ImageError, match="hard link to cache/ab12, which is not there"):
        stacked(layer({MANAGER: Link("cache/ab12", hard=True)}))


@pytest.mark.parametrize(
    "name", ["../vllm/__init__.py", "usr/../../vllm/__init__.py", "/../vllm/__init__.py"]
)
def test_entry_that_leaves_the_root_is_refused(name: str) -> None:
    with pytest.raises(ImageError, match="leads out of the root"):
        stacked(layer({name: b"evil"}))


def test_whiteout_that_leaves_the_root_is_refused() -> None:
    with pytest.raises(ImageError, match="leads out of the root"):
        stacked(layer({"usr/.wh...": b""}))


def test_hard_link_that_leaves_the_root_is_refused() -> None:
    with pytest.raises(ImageError, match="leads out of the root"):
        stacked(layer({MANAGER: Link("../../etc/passwd", hard=True)}))


def test_absolute_names_are_below_the_root() -> None:
    assert stacked(layer({f"/{MANAGER}": b"x", "./usr/bin/python3": b"y"})).read(MANAGER) == b"x"


def test_symbolic_links_are_followed_inside_the_image() -> None:
    tree = stacked(
        layer(
            {
                "usr/lib64/python3": Link("../lib/python3"),
                "lib": Link("/usr/lib"),
                MANAGER: b"x",
            }
        )
    )
    assert tree.read(MANAGER.replace("usr/lib", "usr/lib64")) == b"x"
    assert tree.read(MANAGER.replace("usr/lib", "lib")) == b"x"


@pytest.mark.parametrize("target", ["../../../../etc", "../../.."])
def test_link_out_of_the_root_is_refused_when_it_is_needed(target: str) -> None:
    tree = stacked(layer({"usr/lib/python3": Link(target)}))
    with pytest.raises(ImageError, match="leads out of the root through a link"):
        tree.read(MANAGER)


def test_circle_of_links_is_refused() -> None:
    tree = stacked(layer({"a": Link("b"), "b": Link("a")}))
    with pytest.raises(ImageError, match="circle of links"):
        tree.read("a/vllm/__init__.py")


@pytest.mark.parametrize("keep", [0.3, 0.6])
def test_truncated_layer_is_refused(keep: float) -> None:
    data = layer({"usr/share/words": b"w" * 50_000, **vllm()})
    with pytest.raises(ImageError, match="layer is truncated or damaged"):
        stacked(data[: int(len(data) * keep)])


def test_oversized_source_is_cut_not_read_whole() -> None:
    assert len(stacked(layer({MANAGER: b"x" * (5 << 20)})).files[MANAGER]) == 4 << 20
