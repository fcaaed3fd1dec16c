"""What is read of an export and of an unpacked image: links, limits and damage."""

from __future__ import annotations

import io
import os
import resource
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.images.image_making import (
    MANAGER,
    PYTHON,
    SITE,
    VLLM,
    Docker,
    Entries,
    Link,
    native,
    tarred,
    unpacked,
    vllm,
)
from vllm_mamba_retire.images import image
from vllm_mamba_retire.images.image import Config, ImageError, Root, read_rootfs, read_tar
from vllm_mamba_retire.images.inspection import inspect


def exported(entries: Entries) -> Root:
    root = Root()
    missing = read_tar(root, io.BytesIO(tarred(entries)))
    if missing:
        read_tar(root, io.BytesIO(tarred(entries)), missing)
    return root


def test_only_what_tells_which_vllm_serves_is_kept() -> None:
    more = {"usr/bin/bash": b"x", "a/vllm/engine/llm.py": b"", "home/app/.netrc": b"secret"}
    assert set(exported({**vllm(), **more}).files) == set(vllm())


def test_interpreter_is_kept_as_far_as_its_header() -> None:
    assert exported({"usr/bin/python3.11": b"x" * 10_000}).files["usr/bin/python3.11"] == b"x" * 512


@pytest.mark.parametrize("name", [f"/{MANAGER}", f"./{MANAGER}", f"usr/../../{MANAGER}"])
def test_every_name_is_below_the_root(name: str) -> None:
    assert exported({name: b"x"}).files == {MANAGER: b"x"}


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("usr/lib64", "lib"),
        ("lib", "/usr/lib"),
        ("lib", "../../../usr/lib"),
        ("usr/lib64", "../../../../../usr/./lib"),
    ],
    ids=["relative", "absolute", "surplus ..", "surplus .. inside"],
)
def test_symbolic_links_are_followed_as_inside_the_image(link: str, target: str) -> None:
    root = exported({link: Link(target), MANAGER: b"x"})
    assert root.read(MANAGER.replace("usr/lib", link)) == b"x"


def test_loops_lead_nowhere() -> None:
    root = exported({"a": Link("b"), "b": Link("/a"), "c": Link("c/c")})
    assert [root.read(f"{name}/vllm/__init__.py") for name in "abc"] == [None] * 3
    assert root.names_in("a") == []


@pytest.mark.parametrize("first", ["cache/ab12", f"opt/{MANAGER}"], ids=["by hash", "by name"])
def test_hard_link_has_the_contents_of_its_first_name(first: str) -> None:
    root = exported({first: b"source", MANAGER: Link(first, hard=True)})
    assert root.read(MANAGER) == b"source"


def test_hard_link_to_a_symbolic_link_is_that_link() -> None:
    # Relative to where the hard link is, as the kernel follows it.
    entries = {"a/python3": Link("python3.11"), "usr/bin/python3": Link("a/python3", hard=True)}
    root = exported({**entries, "usr/bin/python3.11": b"ELF"})
    assert root.read("usr/bin/python3") == b"ELF"


def test_hard_link_to_nothing_is_nothing() -> None:
    assert exported({MANAGER: Link("cache/ab12", hard=True)}).read(MANAGER) is None


def uv_links(farm: Entries, hard: bool = False) -> Entries:
    """Every file of a site folder as a link into a cache, as uv makes them."""
    cached = {
        f"root/.cache/uv/archive-v0/x1/{name.removeprefix(SITE)}": d for name, d in farm.items()
    }
    links = {
        name: Link(
            f"{'' if hard else '/'}root/.cache/uv/archive-v0/x1/{name.removeprefix(SITE)}", hard
        )
        for name in farm
    }
    return {**cached, **links}


@pytest.mark.parametrize("hard", [False, True], ids=["symlink mode", "hardlink mode"])
@pytest.mark.parametrize("how", ["export", "rootfs"])
def test_image_installed_by_uv_with_links(tmp_path: Path, how: str, hard: bool) -> None:
    entries = {**PYTHON, **uv_links(native(), hard)}
    root = exported(entries) if how == "export" else read_rootfs(unpacked(tmp_path, entries))
    found = inspect(Config("test"), root)
    assert (found.reason, found.finding, found.serving.others) == ("native", False, ())
    assert str(found.target.package) == f"/{VLLM}"


def test_absolute_link_is_the_images_not_this_machines(tmp_path: Path) -> None:
    outside = unpacked(tmp_path / "outside", vllm())
    root = unpacked(tmp_path / "root", {**PYTHON, "usr/lib/python3/x": b""})
    (root / SITE).symlink_to(outside / SITE)
    with pytest.raises(ImageError, match="has no vLLM"):
        inspect(Config("test"), read_rootfs(root))


def test_link_out_of_an_unpacked_root_ends_at_the_root(tmp_path: Path) -> None:
    unpacked(tmp_path / "outside", vllm())
    root = unpacked(tmp_path / "root", {**PYTHON, **native("outside")})
    (root / "usr/lib/python3").mkdir(parents=True)
    (root / SITE).symlink_to("../../../../outside")
    assert inspect(Config("test"), read_rootfs(root)).target.version == "0.30.0"


def test_nothing_is_written_into_the_root(tmp_path: Path) -> None:
    root = unpacked(tmp_path, {**PYTHON, **vllm()})
    before = sorted(root.rglob("*"))
    inspect(Config("test"), read_rootfs(root))
    assert sorted(root.rglob("*")) == before


def test_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = unpacked(tmp_path, {**PYTHON, "srv/vllm/x": b""})
    os.mkfifo(root / "srv/vllm/__init__.py")
    assert "srv/vllm/__init__.py" not in read_rootfs(root).files


def test_what_is_no_root_file_system(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(b"")
    with pytest.raises(ImageError, match=r"is not a folder; `podman load -i .*image.tar`"):
        read_rootfs(tmp_path / "image.tar")
    (tmp_path / "oci-layout").write_text("{}")
    with pytest.raises(ImageError, match=r"is an OCI layout, .*; `podman pull oci:"):
        read_rootfs(tmp_path)


def test_truncated_export_is_refused() -> None:
    data = tarred({"usr/share/words": b"w" * 50_000, **vllm()})
    with pytest.raises(ImageError, match="truncated or damaged"):
        read_tar(Root(), io.BytesIO(data[:30_000]))


@pytest.mark.parametrize("noise", [b"", b"no tar" * 1000], ids=["empty", "noise"])
def test_what_is_no_tar_is_refused(noise: bytes) -> None:
    with pytest.raises(ImageError, match="truncated or damaged"):
        read_tar(Root(), io.BytesIO(noise))


def test_oversized_source_is_refused() -> None:
    with pytest.raises(ImageError, match=f"/{MANAGER} has more than 4 MiB"):
        exported({MANAGER: b"x" * (4 << 20) + b"x"})


def test_sum_of_what_is_kept_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_TOTAL_LIMIT", 1 << 20)
    with pytest.raises(ImageError, match="more than 1 MiB of links and vLLM files"):
        exported({f"{n}/{'a/' * 50}x": Link("y" * 1000) for n in range(1000)})


class Endless(io.RawIOBase):
    """A tar header, and as many zero bytes behind it as it promises; made while it is read."""

    def __init__(self, kind: bytes, size: int) -> None:
        member = tarfile.TarInfo("x")
        member.type, member.size = kind, size
        self.head, self.left = member.tobuf(tarfile.GNU_FORMAT), size

    def read(self, size: int = -1) -> bytes:
        head, self.head = self.head[:size], self.head[size:]
        rest = min(size - len(head), self.left)
        self.left -= rest
        return head + bytes(rest)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of more than half a GiB beyond what is in use now fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "kind",
    [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE],
    ids=["pax", "global pax", "long name", "sparse"],
)
def test_huge_header_is_refused_before_it_is_read(kind: bytes) -> None:
    stream = Endless(kind, 2 << 30)
    with pytest.raises(ImageError, match="a header of 2147483648 bytes"):
        read_tar(Root(), stream)  # type: ignore[arg-type]
    assert stream.left > 1 << 30


def test_headers_on_headers_are_refused() -> None:
    head = tarfile.TarInfo("x")
    head.type = tarfile.XHDTYPE
    with pytest.raises(ImageError, match="truncated or damaged"):
        read_tar(Root(), io.BytesIO(head.tobuf(tarfile.GNU_FORMAT) * 10_000))


@pytest.mark.parametrize("where", ["path", "interpreters", "folders"])
def test_time_is_bounded(docker: Docker, where: str) -> None:
    entries: dict[str, bytes | Link] = {**PYTHON, **native()}
    if where == "path":
        entries[f"{SITE}/x.pth"] = b"a\n" * (2 << 20)
    elif where == "interpreters":
        entries |= {f"opt/{n}/bin/python3": b"" for n in range(5_000)}
    else:
        entries |= {f"opt/{n}/.wh..wh..opq": b"" for n in range(20_000)}
    docker.image(tarred(entries), Cmd=["sh"])
    began = time.process_time()
    assert docker.inspected()[0] == 0
    assert time.process_time() - began < 20  # minutes without a bound
