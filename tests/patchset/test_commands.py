"""The four commands on an importable tree, with the probe in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.patchset.real_trees import (
    KNOWN,
    MANAGER,
    RELEASE,
    Cli,
    files_only,
    importable,
    patch_with_gnu,
    series_for,
    snapshot,
)
from vllm_mamba_retire.patchset import childprobe, hunks, lock, operations, transaction, tree
from vllm_mamba_retire.patchset.operations import Known, to_apply, to_revert
from vllm_mamba_retire.patchset.series import sha256
from vllm_mamba_retire.patchset.transaction import TransactionError
from vllm_mamba_retire.releases import Matrix


def test_apply_then_revert(release: str, tmp_path: Path, cli: Cli):
    site = importable(release, tmp_path / "site")
    before = snapshot(site)
    assert cli("check", "--target", site).returncode == 1
    assert childprobe.ask(site).outcome == "stops at the gap"

    applied = cli("apply", "--target", site, "--yes", "--json")
    assert applied.returncode == 0, applied.stdout + applied.stderr
    report = json.loads(applied.stdout)
    assert (report["state"], report["series"]) == ("applied", f"v{release}")
    assert report["probe"] == "the state before the gap is freed once"
    assert sha256((site / MANAGER).read_bytes()) == series_for(release).code.after
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
    assert "was applied already and probed" in again.stderr
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
    assert sha256((site / MANAGER).read_bytes()) == series_for(RELEASE).code.after
    assert cli("diff", "--target", site).stdout == ""


def test_tree_patched_with_gnu_patch_is_known_and_reverted(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    before = snapshot(site)
    patch_with_gnu(site, series_for(RELEASE))
    assert cli("check", "--target", site).returncode == 0
    assert cli("revert", "--target", site, "--yes").returncode == 0
    assert snapshot(site) == before


def test_half_a_series_is_told_and_finished(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    first = series_for(RELEASE).code.diff.hunks[0]
    text = (site / MANAGER).read_text()
    (site / MANAGER).write_text(text.replace(first.old, first.new))
    told = json.loads(cli("check", "--target", site, "--json").stdout)
    assert (told["state"], told["exit_code"]) == ("half applied", 1)
    assert cli("apply", "--target", site, "--yes", "--no-probe").returncode == 0
    assert cli("check", "--target", site).returncode == 0


def test_foreign_change_is_refused_by_hash(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")
    with (site / MANAGER).open("a") as stream:
        stream.write("# a vendor was here\n")
    before = snapshot(site)
    assert json.loads(cli("check", "--target", site, "--json").stdout)["state"] == "foreign change"
    for command in ("apply", "revert"):
        refused = cli(command, "--target", site, "--yes")
        assert refused.returncode == 1
        assert "refused, nothing was changed" in refused.stderr
        assert sha256((site / MANAGER).read_bytes()) in refused.stderr
    assert snapshot(site) == before


@pytest.mark.parametrize(
    ("other", "why"),
    [("0.30.0", "carries the fix itself"), ("0.25.1", "does not reach the defect")],
)
def test_release_that_needs_nothing_is_fine_and_left_alone(
    other: str, why: str, tmp_path: Path, cli: Cli
):
    site = files_only(other, tmp_path / "site")
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


def a_series_that_fixes_nothing() -> Known:
    """The newest release's series, its code replaced by a comment, with the hashes to match."""
    series = series_for(RELEASE)
    first = series.code.diff.hunks[0]
    lines = first.old.splitlines(keepends=True)
    comment = "            # changes nothing\n"
    diff = replace(series.code.diff, hunks=(hunks.Hunk(first.old, lines[0] + comment + lines[1]),))
    released = (Path(os.environ["MAMBA_RETIRE_TEST_TREES"]) / RELEASE / MANAGER).read_text()
    after = sha256(hunks.apply(diff, released).encode())
    harmless = replace(series, changes=(replace(series.code, diff=diff, after=after),))
    matrix: Matrix = KNOWN.matrix
    return Known(matrix, (harmless,))


def test_patched_code_that_does_not_behave_is_taken_back(tmp_path: Path):
    site = importable(RELEASE, tmp_path / "site")
    before = snapshot(site)
    known = a_series_that_fixes_nothing()
    shown = to_apply(tree.look(site, known.matrix, known.series))
    with pytest.raises(TransactionError, match="does not behave as it should: the state before"):
        operations.perform(
            site, known, to_apply, shown, lambda: operations.require_fixed(site) and None
        )
    assert snapshot(site) == before


def test_tree_that_cannot_be_probed_is_taken_back(tmp_path: Path, cli: Cli):
    site = files_only(RELEASE, tmp_path / "site")  # no more of vLLM than these files
    before = snapshot(site)
    done = cli("apply", "--target", site, "--yes")
    assert done.returncode == 1
    assert "cannot import vllm.v1.core.single_type_kv_cache_manager" in done.stderr
    assert "--no-probe" in done.stderr
    assert snapshot(site) == before


def test_ctrl_c_while_it_probes_takes_everything_back(tmp_path: Path):
    site = files_only(RELEASE, tmp_path / "site")
    before = snapshot(site)
    # A vLLM that is never done importing, and says when it has begun.
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    (site / "vllm/__init__.py").write_text(
        f"import signal\nopen({str(begun)!r}, 'w').write('x')\nsignal.pause()\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"),
            *("apply", "--yes", "--target", str(site)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    begun.read_text()  # returns when the probe has written
    assert sha256((site / MANAGER).read_bytes()) == series_for(RELEASE).code.after
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "failed, nothing was changed: interrupted" in said
    (site / "vllm/__init__.py").unlink()
    assert snapshot(site) == before


def test_tests_for_vllm_go_on_and_off_in_a_checkout(tmp_path: Path, cli: Cli):
    checkout = files_only(RELEASE, tmp_path / "checkout", "archive")
    (checkout / "tests/v1/core").mkdir(parents=True)
    before = snapshot(checkout)
    done = cli("apply", "--target", checkout, "--tests", "--yes", "--no-probe")
    assert done.returncode == 0, done.stderr
    for change in series_for(RELEASE).changes:
        assert sha256((checkout / change.path).read_bytes()) == change.after
    assert cli("check", "--target", checkout, "--tests").returncode == 0
    assert cli("revert", "--target", checkout, "--yes").returncode == 0
    assert snapshot(checkout) == before


def killed_before_line(number: int, modules: tuple[ModuleType, ...]) -> None:
    """From now on this process is killed before the `number`-th line that it runs in `modules`."""
    files = {module.__file__ for module in modules}
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("plan", [to_apply, to_revert])
def test_kill_before_any_line_leaves_the_tree_old_or_new(
    plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On the real file, through the whole of `perform`; then the same again, to its end."""
    # The power stays on here, and flushing takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    old, new = (getattr(series_for(RELEASE).code, when) for when in ("before", "after"))

    def run(site: Path, plan) -> None:
        shown = plan(tree.look(site, KNOWN.matrix, KNOWN.series))
        operations.perform(site, KNOWN, plan, shown, lambda: None)

    kills = 0
    for number in range(1, 5000):
        site = files_only(RELEASE, tmp_path / str(number))
        if plan is to_revert:
            run(site, to_apply)
        child = os.fork()
        if child == 0:
            killed_before_line(number, (operations, transaction, lock))
            run(site, plan)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        digest = sha256((site / MANAGER).read_bytes())
        assert digest in (old, new), f"line {number}"
        state = tree.look(site, KNOWN.matrix, KNOWN.series).state
        assert state is (tree.State.APPLIED if digest == new else tree.State.PRISTINE)
        run(site, plan)
        assert sha256((site / MANAGER).read_bytes()) == (new if plan is to_apply else old)
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    assert kills > 100, "the kill did not reach the transaction"
    assert os.waitstatus_to_exitcode(status) == 0
