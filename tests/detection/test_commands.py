"""``verify`` on real releases, and ``status`` where something is broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.children import Child
from tests.detection.sites import LATENT, LIVE, NATIVE, Site, own_path
from tests.detection.trees import BY_HAND, LINE, edit, in_class
from vllm_mamba_retire.verification import LAGS, bound

RunCommand = Callable[..., tuple[int, Any]]
_COMMAND = "from vllm_mamba_retire.cli import app; app({arguments!r})"
_BOUNDS = [bound(lag) for lag in LAGS]


@pytest.fixture
def command(child: Child) -> RunCommand:
    """Runs a command with ``--json`` on a path: exit status and answer."""

    def run(path: str, *arguments: str, **environment: str) -> tuple[int, Any]:
        code = _COMMAND.format(arguments=[*arguments, "--json"])
        done = child(code, PYTHONPATH=os.pathsep.join([path, own_path()]), **environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run


def test_verify_shows_the_defect_and_the_fix_on_a_live_release(
    trees: Path, command: RunCommand
) -> None:
    code, answer = command(str(trees / LIVE), "verify")
    assert (code, answer["schema"], answer["proven"]) == (0, 1, True)
    assert answer["stock"]["outcome"] == "stops at the gap"
    assert answer["stock"]["peaks"] == [bound(0), 71, 71]
    assert answer["patched"]["outcome"] == "retires"
    assert answer["patched"]["peaks"] == _BOUNDS


def test_verify_shows_no_difference_on_a_native_release(trees: Path, command: RunCommand) -> None:
    code, answer = command(str(trees / NATIVE), "verify")
    assert (code, answer["patched"]["verdict"]["reason"]) == (0, "native")
    assert answer["stock"]["peaks"] == answer["patched"]["peaks"] == _BOUNDS


def test_verify_says_that_a_latent_release_needs_no_lag(trees: Path, command: RunCommand) -> None:
    code, answer = command(str(trees / LATENT), "verify")
    assert (code, answer["patched"]["verdict"]["reason"]) == (0, "latent")
    assert "this release's scheduler retires with lag 0" in answer["sentence"]


@pytest.mark.parametrize("release", [LIVE, NATIVE])
def test_verify_shows_whether_the_newest_state_is_kept(
    trees: Path, command: RunCommand, release: str
) -> None:
    code, answer = command(str(trees / release), "verify", MAMBA_RETIRE_KEEP="newest")
    assert (code, answer["patched"]["keep"]["state"]) == (0, "on")
    assert (answer["stock"]["newest"], answer["patched"]["newest"]) == ("plain", "keeps")


def test_verify_says_that_keeping_is_not_possible(trees: Path, command: RunCommand) -> None:
    code, answer = command(str(trees / LATENT), "verify", MAMBA_RETIRE_KEEP="newest")
    assert (code, answer["proven"]) == (1, False)
    assert (answer["patched"]["keep"]["state"], answer["patched"]["newest"]) == (
        "unavailable",
        "plain",
    )
    assert answer["sentence"].startswith("not proven: keep unavailable: it needs a vLLM that")


def test_verify_exits_2_if_the_manager_cannot_be_imported(
    site: Callable[..., Site], command: RunCommand
) -> None:
    tree = site(LIVE)
    tree.edit_manager(("class MambaManager(", "raise OSError('torn')\nclass MambaManager("))
    code, answer = command(str(tree.folder), "verify")
    assert (code, answer["proven"]) == (2, False)
    assert "cannot be imported (OSError: torn)" in answer["sentence"]


def test_verify_without_a_vllm_has_nothing_to_run(tmp_path: Path, command: RunCommand) -> None:
    code, answer = command(str(tmp_path), "verify")
    assert (code, answer["patched"]["verdict"]["reason"]) == (2, "no-target")


def test_status_of_a_broken_vllm_says_what_is_wrong(
    site: Callable[..., Site], command: RunCommand
) -> None:
    tree = site(LIVE)
    tree.manager.unlink()
    tree.manager.write_text("def (\n")
    code, answer = command(str(tree.folder), "status")
    assert (code, answer["reason"]) == (1, "failed")
    assert f"{tree.manager} does not parse" in answer["sentence"]
    assert answer["table"]["version"] == LIVE


@pytest.mark.parametrize(
    ("arguments", "reason", "exit_status"),
    [((), "fixed-elsewhere", 0), (("--no-probe",), "drifted", 1)],
)
def test_status_probes_where_the_files_cannot_decide(
    site: Callable[..., Site],
    command: RunCommand,
    arguments: tuple[str, ...],
    reason: str,
    exit_status: int,
) -> None:
    tree = site(LIVE)
    in_class(BY_HAND)(tree)
    code, answer = command(str(tree.folder), "status", *arguments)
    assert (answer["reason"], code) == (reason, exit_status), answer["sentence"]


@pytest.mark.parametrize(
    ("environment", "reason", "exit_status"),
    [({}, "drifted", 1), ({"MAMBA_RETIRE_ALLOW_DRIFT": "1"}, "patched", 0)],
    ids=["without", "with"],
)
def test_status_counts_the_permission_to_patch_a_changed_class(
    site: Callable[..., Site],
    command: RunCommand,
    environment: dict[str, str],
    reason: str,
    exit_status: int,
) -> None:
    tree = site(LIVE)
    edit(LINE, LINE.replace("request_id", "str(request_id)"))(tree)
    code, answer = command(str(tree.folder), "status", **environment)
    assert (answer["reason"], code) == (reason, exit_status), answer["sentence"]


def test_status_with_a_broken_table_says_where(trees: Path, child: Child, tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    table.write_text("schema: 1\nfix: here\n")
    code = (
        "import pathlib, vllm_mamba_retire.releases as m\n"
        f"m._shipped = lambda: pathlib.Path({str(table)!r})\n"
        + _COMMAND.format(arguments=["status", "--json"])
    )
    done = child(code, PYTHONPATH=os.pathsep.join([str(trees / LIVE), own_path()]))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["reason"]) == (1, "failed")
    assert f"{table}: fix: " in answer["sentence"]


def test_status_tells_of_a_mode_that_does_not_exist(trees: Path, command: RunCommand) -> None:
    code, answer = command(str(trees / LIVE), "status", MAMBA_RETIRE="requier")
    assert code == 1
    assert "MAMBA_RETIRE=requier is not auto, require or off" in answer["left_out"]


def test_status_names_a_product_that_touches_the_class(
    trees: Path, command: RunCommand, tmp_path: Path
) -> None:
    metadata = tmp_path / "others" / "vllm_ascend-0.29.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.29.0\n"
    )
    _, answer = command(os.pathsep.join([str(trees / LIVE), str(metadata.parent)]), "status")
    (product,) = answer["products"]
    assert (product["distribution"], product["version"]) == ("vllm-ascend", "0.29.0")
