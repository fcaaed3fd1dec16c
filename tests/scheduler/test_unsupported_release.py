"""A release that lacks what a command uses: exit 2 and one sentence, from every such command.

The release on the path with one name renamed in all of its files, as a later release might.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.table.watch import broken_checks

from tests.detection.sites import copied, own_path
from vllm_mamba_retire.child import ChildError
from vllm_mamba_retire.releases import Matrix, Status
from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.sides import STOCK, replay_all

SMALL = Scenario("small", 1568, 4096, (Arrival("a", 9_000, 4),), spec=2, groups=1)
# What the replay uses of vLLM, from the platform to the state of a request.
REPLAY_USES = (
    "_current_platform",
    "mamba_block_size",
    "get_request_block_hasher",
    "AsyncScheduler",
    "single_type_managers",
    "sampled_token_ids",
    "scheduled_new_reqs",
    "num_preemptions",
)


def without(name: str, release: Path, folder: Path) -> Path:
    """A copy of a release with `name` renamed wherever it stands."""
    site = copied(release, folder)
    found = re.compile(rf"\b{name}\b")
    for file in site.package.rglob("*.py"):
        text = file.read_text()
        if name in text and (changed := found.sub(f"{name}_of_later", text)) != text:
            file.unlink()  # it may share its bytes with the release's own tree
            file.write_text(changed)
    return site.folder


@pytest.mark.parametrize("name", REPLAY_USES)
def test_replay_error_names_the_release_and_the_missing_part(
    name: str, release: str, trees: Path, tmp_path: Path, matrix: Matrix
) -> None:
    tree = without(name, trees / release, tmp_path / "site")
    with pytest.raises(ChildError) as caught:
        replay_all([SMALL], STOCK, path=[tree])
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert f"vLLM {release}" in sentence
    assert re.search(rf"\b{name}\b(?!_of_later)", sentence)
    assert f"known to work is {matrix.releases[-1].version}" in sentence


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("update_from_output", ["replay", "--block", "1568", "--budget", "4096"]),
        (
            "update_from_output",
            ["plan", "--block", "1568", "--budget", "4096", "--prompt", "9000", "--lag", "1"],
        ),
        ("get_num_free_blocks", ["verify"]),
        ("get_num_free_blocks", ["apply", "--yes", "--target", "{tree}"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_every_command_that_runs_vllm_ends_with_exit_2(
    name: str, command: list[str], release: str, status: Status, trees: Path, tmp_path: Path,
    matrix: Matrix,
) -> None:  # fmt: skip
    if command[0] == "apply" and status is not Status.LIVE:
        command = ["verify"]  # there is no series to apply
    tree = without(name, trees / release, tmp_path / "site")
    done = run(tree, "from vllm_mamba_retire.cli import main; main()", *command)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    *before, line = done.stderr.strip().splitlines()
    assert not before or command[0] == "apply"  # which shows the diff first
    for said in (f"vLLM {release}", name, f"known to work is {matrix.releases[-1].version}"):
        assert said in line


_ONE_CHECK = """
import json
from tools.table.behaviour import scheduler
from vllm_mamba_retire.replay.sides import SIDES
print(json.dumps(scheduler(SIDES[:1], specs=(0,))))
"""


def test_the_watch_says_which_replays_broke(release: str, trees: Path, tmp_path: Path) -> None:
    tree = without("update_from_output", trees / release, tmp_path / "site")
    (broken,) = broken_checks(checks(tree))
    assert "scheduler replay" in broken
    assert "update_from_output" in broken
    assert broken_checks(checks(trees / release)) == []  # control: the release as it is


def checks(tree: Path) -> list[dict[str, str]]:
    """One of the checks that the watch runs on a release."""
    answer = run(tree, _ONE_CHECK).stdout
    return [dict(zip(("run", "result"), each, strict=True)) for each in json.loads(answer)]


def run(tree: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process that finds this package and the vLLM at `tree`."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code, *(each.format(tree=tree) for each in arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, own_path(), root)))},
        capture_output=True,
        text=True,
        check=False,
    )
