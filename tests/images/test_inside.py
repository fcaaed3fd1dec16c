"""The lane itself: what runs inside, what is left out and why, and what is written back."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.images import rollout as images

from vllm_mamba_retire.images.engine import Engine
from vllm_mamba_retire.images.inspection import Inspection, inspect
from vllm_mamba_retire.releases import load_matrix

BuildImage = Callable[..., str]
TABLE = Path(__file__).parents[2] / "compat_matrix.yaml"
INSIDE = [
    "--engine=podman",
    f"--mount={os.environ['MAMBA_RETIRE_TEST_MOUNT']}",
    f"--wheels={os.environ['MAMBA_RETIRE_TEST_WHEELS']}",
]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(images, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture(scope="module")
def live_outcome(live: str) -> images.ImageResult:
    (outcome,) = images.main([f"--image={live}", *INSIDE])
    return outcome


@pytest.fixture(scope="module")
def inspected(live: str) -> Inspection:
    return inspect(*Engine("podman").read(live))


def test_live_release_leaks_and_the_installed_package_fixes_it(
    live_outcome: images.ImageResult,
) -> None:
    assert (live_outcome.state, live_outcome.says.split(";")[0]) == (
        "passed",
        "stock stops at the gap, with this package patched",
    )
    inside = live_outcome.data["inside"]
    assert inside["stock"]["reason"] == "off"
    assert inside["started"]["manager"].startswith("/usr/local/lib/python3.11/dist-packages/vllm/")
    assert inside["tests"]["tests"] > inside["tests"]["skipped"]


def test_native_release_is_left_alone(native: str, results: Path) -> None:
    (outcome,) = images.main([f"--image={native}", *INSIDE])
    assert (outcome.state, outcome.says.split(";")[0]) == (
        "passed",
        "stock retires, with this package native",
    )
    (kept,) = results.glob("*.json")
    data = json.loads(kept.read_text())
    assert (data["schema"], data["state"], data["inspected"]["reason"]) == (1, "passed", "native")


def changed(found: dict[str, Any], *path: str, to: object) -> dict[str, Any]:
    """A copy with one value changed."""
    result = copy.deepcopy(found)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return result


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (("stock", "probe"), "retires", "the control shows nothing"),
        (("started", "probe"), "stops at the gap", "with this package vLLM stops at the gap"),
        (("started", "reason"), "drifted", "from inside drifted"),
        (("started", "manager"), "/other/vllm/x.py", "/other/vllm/x.py serves"),
        (("verify", "exit"), 1, "verify says"),
        (("tests", "failed"), ["test_one"], "test_one"),
        (("tests", "tests"), 0, "release tests"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_each_thing_that_is_wrong_is_a_failure(
    inspected: Inspection,
    live_outcome: images.ImageResult,
    path: tuple[str, ...],
    to: object,
    said: str,
) -> None:
    inside = live_outcome.data["inside"]
    assert images.judge(inspected, inside) == ""
    assert said in images.judge(inspected, changed(inside, *path, to=to))


def test_image_that_breaks_inside_is_a_failure_with_its_message(
    live: str, derived: BuildImage
) -> None:
    site = "/usr/local/lib/python3.11/dist-packages"
    image = derived(f"FROM {live}", f"RUN echo 'raise RuntimeError(42)' > {site}/vllm/__init__.py")
    (outcome,) = images.main([f"--image={image}", *INSIDE])
    assert outcome.state == "failed"
    assert "RuntimeError: 42" in outcome.says


def test_container_that_does_not_start_is_a_failure(inspected: Inspection) -> None:
    inside = images.run_inside(Engine("podman"), inspected, Path("/nowhere"), [])
    assert "no such file or directory" in inside["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine=nerdctl"], "nerdctl is not installed"),
        (["--engine=podman", "--image=localhost/nowhere:1"], "podman has no image"),
        (["--engine=podman", "--image=localhost/nowhere:1", "--pull"], "was refused"),
    ],
    ids=["no engine", "not there", "not pulled"],
)
def test_image_that_cannot_run_is_skipped_or_fails_if_required(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = images.main(arguments)
    assert [outcome.state for outcome in outcomes] == ["skipped"]
    assert said in outcomes[0].says
    assert "images: 0 passed, 0 failed, 1 skipped" in capsys.readouterr().out
    assert not images.failed(outcomes, arguments)
    assert images.failed(outcomes, [*arguments, "--require"])


def test_image_for_another_machine_is_skipped(
    live: str, derived: BuildImage, tmp_path: Path
) -> None:
    # The first bytes of an ELF file for arm64 stand in for its Python.
    header = b"\x7fELF\x02\x01\x01" + bytes(11) + (183).to_bytes(2, "little") + bytes(44)
    (tmp_path / "python3.11").write_bytes(header)
    image = derived(f"FROM {live}", "COPY python3.11 /usr/bin/python3.11")
    (outcome,) = images.main([f"--image={image}", *INSIDE])
    assert (outcome.state, outcome.says) == ("skipped", "is for arm64, this machine is amd64")


def test_one_image_by_default_and_all_on_request() -> None:
    listed = load_matrix().images
    (default,) = images.main(["--engine=nerdctl"])
    assert default.image == "vllm/vllm-openai:v0.29.0"
    everything = images.main(["--engine=nerdctl", "--all"])
    assert [o.image for o in everything] == [f"{i.repository}:{i.tag}" for i in listed]


def test_result_is_written_back_as_evidence(
    live_outcome: images.ImageResult, tmp_path: Path
) -> None:
    table = Path(shutil.copy(TABLE, tmp_path))
    name = "vllm/vllm-openai-rocm:v0.30.0"
    before = load_matrix(table)
    for _ in range(2):  # a later run takes the place of an earlier one
        images.write_back(table, images.ImageResult(name, "passed", "all well", live_outcome.data))
    after = load_matrix(table)
    (changed,) = (new for old, new in zip(before.images, after.images, strict=True) if old != new)
    assert f"{changed.repository}:{changed.tag}" == name
    (finding,) = changed.evidence
    assert (finding.run, finding.result) == ("nox -s images", "all well")
    assert (changed.python, changed.vllm) == (
        "3.11",
        "/usr/local/lib/python3.11/dist-packages/vllm",
    )
    comments = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]
    assert [line for line in table.read_text().splitlines() if line.startswith("#")] == comments


def test_image_that_is_not_in_the_table_is_not_written_back(tmp_path: Path) -> None:
    table = Path(shutil.copy(TABLE, tmp_path))
    with pytest.raises(ValueError, match="has no image localhost/x:1"):
        images.write_back(table, images.ImageResult("localhost/x:1", "passed", ""))
