"""What is read of a vLLM on disk is bounded: its files may be those of another user."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mamba_retire.settings import find_installed
from vllm_mamba_retire.target import read_target

ENTRY = "[vllm.general_plugins]\nmamba_retire = vllm_mamba_retire.plugin:register\n"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A site-packages with a vLLM and this package; fails where reading it takes ten seconds."""
    (tmp_path / "vllm").mkdir()
    for name, about in {
        "vllm-0.29.0": "Name: vllm\nVersion: 0.29.0\n",
        "vllm_mamba_retire-0.1.0": "Name: vllm-mamba-retire\nVersion: 0.1.0\n",
    }.items():
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(about)
        (folder / "entry_points.txt").write_text(ENTRY)

    def too_long(*_: object) -> None:
        raise TimeoutError("reading has not ended")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(10)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_metadata_says_version_and_entry_point(site: Path) -> None:
    assert read_target(site / "vllm").version == "0.29.0"
    installed = find_installed([str(site)])
    assert (installed.version, installed.entry_point) == ("0.1.0", True)


@pytest.mark.parametrize("name", ["METADATA", "entry_points.txt", "top_level.txt"])
@pytest.mark.parametrize("made", ["fifo", "device", "missing"])
def test_metadata_that_is_no_file_is_not_waited_for(site: Path, name: str, made: str) -> None:
    for folder in site.glob("*.dist-info"):
        (folder / name).unlink(missing_ok=True)
        if made == "fifo":
            os.mkfifo(folder / name)
        elif made == "device":
            (folder / name).symlink_to("/dev/zero")
    target, installed = read_target(site / "vllm"), find_installed([str(site)])
    assert target.version == (None if name == "METADATA" else "0.29.0")
    assert installed.version == (None if name == "METADATA" else "0.1.0")
    assert installed.entry_point == (name != "entry_points.txt")


@pytest.mark.parametrize("name", ["single_type_kv_cache_manager.py", "_version.py"])
def test_source_that_is_no_file_is_not_waited_for(site: Path, name: str) -> None:
    folder = site / "vllm" / ("v1/core" if name.startswith("single") else "")
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / name)
    assert read_target(site / "vllm").source is None
