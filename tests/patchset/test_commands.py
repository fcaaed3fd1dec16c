"""The four commands on an importable tree, with the probe in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patchset.real_trees import (
    MANAGER,
    MATRIX,
    RELEASE,
    Cli,
    files_only,
    importable,
    patch_with_gnu,
    series_for,
    snapshot,
)
from vllm_mamba_retire import patchset
from vllm_mamba_retire.patchset import RefusedError, change, read_hunks, read_tree, sha256


def test_apply_then_revert(release: str, tmp_path: Path, cli: Cli):
    site = importable(release, tmp_path / "site")
    before = snapshot(site)
    assert cli("check", "--target", site).returncode == 1

    applied = cli("apply", "--target", site, "--yes", "--json")
    assert applied.returncode == 0, applied.stdout + applied.stderr
    report = json.loads(applied.stdout)
    assert (report["state"], report["series"]) == ("applied", f"v{release}")
    assert report["probe"] == "the state before the gap is freed once"
    assert sha256((site / MANAGER).read_bytes()) == series_for(release).sha256_after
    assert cli("check", "--target", site).returncode == 0

    reverted = cli("revert", "--target", site, "--yes")
    assert reverted.returncode == 0, reverted.stderr
    assert snapshot(site) == before


def test_apply_twice_changes_nothing_and_probes_again(tmp_path: Path, cli: Cli):
    site = importable(RELEASE, tmp_path / "site")
    assert cli("apply", "--target", site, "--yes").returncode == 0
    before = snapshot(site)
    again = cli("apply", "--target", site)  # nothing to ask about
    assert again.returncode == 0
    assert "applied already; probe: the state before the gap is freed once" in again.stderr
    assert snapshot(site) == before


def test_apply_without_anybody_to_ask_changes_nothing(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    before = snapshot(site)
    done = cli("apply", "--target", site, "--no-probe")
    assert done.returncode == 2
    assert "pass --yes" in done.stderr
    assert "+    def _remove_blocks_in_range(" in done.stderr  # the diff was shown
    assert snapshot(site) == before


@pytest.mark.parametrize(("answer", "code", "state"), [("y", 0, "applied"), ("n", 1, "pristine")])
def test_apply_asks_on_a_terminal(answer: str, code: int, state: str, tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    person, terminal = pty.openpty()
    os.write(person, f"{answer}\n".encode())
    done = cli("apply", "--target", site, "--no-probe", stdin=terminal)
    assert done.returncode == code, done.stderr
    assert f"Change vLLM {RELEASE} at {site}?" in done.stderr
    assert json.loads(cli("check", "--target", site, "--json").stdout)["state"] == state


def test_diff_is_one_for_patch_and_changes_nothing(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    before = snapshot(site)
    shown = cli("diff", "--target", site)
    assert shown.returncode == 0
    assert snapshot(site) == before
    subprocess.run(["patch", "-s", "-p1", "-d", site], input=shown.stdout, text=True, check=True)
    assert sha256((site / MANAGER).read_bytes()) == series_for(RELEASE).sha256_after
    assert cli("diff", "--target", site).stdout == ""


def test_tree_patched_with_gnu_patch_is_known_and_reverted(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    before = snapshot(site)
    patch_with_gnu(site, RELEASE)
    assert cli("check", "--target", site).returncode == 0
    assert cli("revert", "--target", site, "--yes").returncode == 0
    assert snapshot(site) == before


def test_half_a_series_is_told_and_finished(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    old, new = read_hunks(series_for(RELEASE))[0]
    (site / MANAGER).write_bytes((site / MANAGER).read_bytes().replace(old, new))
    told = json.loads(cli("check", "--target", site, "--json").stdout)
    assert (told["state"], told["exit_code"]) == ("half applied", 1)
    assert cli("apply", "--target", site, "--yes", "--no-probe").returncode == 0
    assert cli("check", "--target", site).returncode == 0


@pytest.mark.parametrize(
    ("other", "why"),
    [("0.30.0", "carries the fix"), ("0.25.1", "does not reach the defect")],
)
def test_release_that_needs_nothing_is_fine_and_left_alone(
    other: str, why: str, tmp_path: Path, cli: Cli
):
    site = importable(other, tmp_path / "site")
    before = snapshot(site)
    told = cli("check", "--target", site)
    assert (told.returncode, why in told.stderr) == (0, True)
    refused = cli("apply", "--target", site, "--yes")
    assert (refused.returncode, why in refused.stderr) == (1, True)
    assert snapshot(site) == before


def test_no_vllm_is_a_usage_error(tmp_path: Path, cli: Cli):
    done = cli("check", "--target", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}: no vllm/" in done.stderr


def test_code_that_does_not_behave_is_never_written(tmp_path: Path):
    site = importable(RELEASE, tmp_path / "site")
    before = snapshot(site)
    tree = read_tree(site, MATRIX)
    with pytest.raises(RefusedError, match="fails the probe: the state before"):
        change(tree, tree.data + b"# changes nothing\n", probed=True)
    assert snapshot(site) == before


def test_tree_that_cannot_be_probed_is_taken_back(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")  # no more of vLLM than these files
    before = snapshot(site)
    done = cli("apply", "--target", site, "--yes")
    assert done.returncode == 1
    assert "cannot import vllm.v1.core.single_type_kv_cache_manager" in done.stderr
    assert "--no-probe" in done.stderr
    assert snapshot(site) == before


@pytest.mark.parametrize(
    "ending",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL],
    ids=lambda ending: ending.name,
)
def test_signal_during_the_probe_leaves_tree_and_no_child(ending: signal.Signals, tmp_path: Path):
    site = files_only(RELEASE, tmp_path / "site")
    # A vLLM that is never done importing, and says when it has begun.
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    (site / "vllm/__init__.py").write_text(
        "import os, time\n"
        f"with open({str(begun)!r}, 'w') as stream:\n"
        "    stream.write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    before = snapshot(site)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"),
            *("apply", "--yes", "--target", str(site)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        # A run in the background, or under nohup, hands ignored signals on.
        preexec_fn=lambda: ending is signal.SIGKILL or signal.signal(ending, signal.SIG_DFL),
    )
    child = psutil.Process(int(begun.read_text()))
    assert child.is_running()
    assert snapshot(site) == before
    process.send_signal(ending)
    _, said = process.communicate()
    if ending is signal.SIGINT:
        assert process.returncode == 1
        assert "interrupted, nothing was changed" in said
    else:
        assert process.returncode == -ending
    assert psutil.wait_procs([child], timeout=30)[1] == [], "the child outlives the command"
    assert snapshot(site) == before


def test_probe_runs_the_new_text_not_the_file_or_its_bytecode(tmp_path: Path):
    site = importable(RELEASE, tmp_path / "site")
    tree = read_tree(site, MATRIX)
    assert tree.patched is not None
    assert patchset._probe(tree, tree.patched) == "the state before the gap is freed once"
    with pytest.raises(RefusedError, match="the state before the gap is kept"):
        patchset._probe(tree, tree.data)
    assert not list(site.rglob("*.pyc"))


@pytest.mark.parametrize("version", ["0.30.0", "0.30.0rc1", "0.31.0", "0.25.1", "0.29.0"])
def test_version_string_does_not_make_a_leak_fine(version: str, tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    with (site / MANAGER).open("a") as stream:
        stream.write("# one comment more\n")
    (site / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
    told = cli("check", "--target", site)
    assert told.returncode == 1
    assert "foreign change" in told.stderr


def test_a_fixed_release_ignores_a_state_file_left_behind(tmp_path: Path, cli: Cli):
    site = files_only("0.30.0", tmp_path / "site")
    clean = snapshot(site)
    # As the state file of a development version, which named the series of what was there then.
    record = site / ".vllm-mamba-retire.json"
    record.write_text(json.dumps({"schema": 1, "series": "v0.29.0", "version": "0", "files": []}))
    told = cli("check", "--target", site)
    assert (told.returncode, "carries the fix" in told.stderr) == (0, True)
    assert snapshot(site) == clean


def test_other_code_that_retires_is_fine_and_left_alone(tmp_path: Path, cli: Cli):
    site = importable(RELEASE, tmp_path / "site")
    patch_with_gnu(site, RELEASE)
    with (site / MANAGER).open("a") as stream:
        stream.write("# one comment more\n")
    before = snapshot(site)
    told = json.loads(cli("check", "--target", site, "--json").stdout)
    assert (told["state"], told["exit_code"]) == ("not covered", 0), told["sentence"]
    unprobed = json.loads(cli("check", "--target", site, "--no-probe", "--json").stdout)
    assert (unprobed["state"], unprobed["exit_code"]) == ("foreign change", 1)
    assert cli("apply", "--target", site, "--yes").returncode == 1
    assert snapshot(site) == before
