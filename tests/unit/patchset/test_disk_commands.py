"""The four commands on a small release: what they print; exit codes tell about the tree."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.patchset.small_release import HALVES, PATCHED, RELEASED, everything
from vllm_mamba_retire import patchset, releases
from vllm_mamba_retire.cli import app
from vllm_mamba_retire.patchset import FILE
from vllm_mamba_retire.releases import Matrix

RunCommand = Callable[..., Any]


@pytest.fixture
def run(site: Path, small: Matrix, monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    """Runs a command on the site, without a terminal."""
    monkeypatch.setattr(releases, "load_matrix", lambda: small)

    def act(command: str, *options: str) -> Any:
        return CliRunner().invoke(app, [command, "--target", str(site), *options])

    return act


def test_json_has_the_same_keys_for_every_command_and_outcome(run: RunCommand, site: Path):
    keys = {
        *("schema", "command", "root", "version", "series", "state", "sentence"),
        *("probe", "files", "notes", "exit_code"),
    }
    expected = [
        (["check"], "pristine", 1, {str(site / FILE): "pristine"}),
        (["apply", "--no-probe"], "pristine", 2, {}),
        (["apply", "--no-probe", "--yes"], "applied", 0, {str(site / FILE): "applied"}),
        (["apply", "--no-probe"], "applied", 0, {}),
        (["check"], "applied", 0, {str(site / FILE): "applied"}),
        (["revert"], "applied", 2, {}),
        (["revert", "--yes"], "pristine", 0, {str(site / FILE): "reverted"}),
        (["revert", "--yes"], "pristine", 0, {}),
    ]
    for arguments, state, code, files in expected:
        done = run(*arguments, "--json")
        report = json.loads(done.stdout)
        assert set(report) == keys
        assert (report["state"], report["exit_code"], report["files"]) == (state, code, files)
        assert (report["series"], report["version"]) == ("v0.29.0", "0.29.0")
        assert done.exit_code == code


def test_without_confirmation_nothing_is_changed(run: RunCommand, site: Path):
    before = everything(site)
    done = run("apply", "--no-probe", "--json")
    assert "pass --yes" in json.loads(done.stdout)["sentence"]
    done = run("apply", "--no-probe")
    assert done.exit_code == 2
    assert "nothing was changed; pass --yes to confirm" in done.stderr
    assert "+b2 = 20" in done.stderr
    assert everything(site) == before


@pytest.mark.parametrize(
    ("text", "state", "sentence"),
    [
        (RELEASED, "pristine", "run apply"),
        (PATCHED, "applied", "the series is applied"),
        (HALVES[0], "half applied", "run apply to finish or revert"),
        (RELEASED + "# mine\n", "foreign change", "Reinstall vLLM"),
    ],
)
def test_check_says_the_state_and_what_to_do(
    text: str, state: str, sentence: str, run: RunCommand, site: Path
):
    (site / FILE).write_text(text)
    done = run("check")
    assert done.exit_code == (0 if state == "applied" else 1)
    assert f"vLLM 0.29.0 at {site}: {state}: " in done.stderr
    assert sentence in done.stderr


@pytest.mark.parametrize("command", ["diff", "apply", "revert"])
def test_foreign_change_is_refused_with_its_hash(command: str, run: RunCommand, site: Path):
    (site / FILE).write_text(RELEASED + "# mine\n")
    before = everything(site)
    done = run(command, *([] if command == "diff" else ["--yes"]))
    assert done.exit_code == 1
    assert "refused, nothing was changed" in done.stderr
    assert patchset.sha256((site / FILE).read_bytes()) in done.stderr
    assert everything(site) == before


def test_check_is_a_finding_where_other_code_runs(run: RunCommand, site: Path):
    (site / FILE).write_text(PATCHED)
    assert run("check").exit_code == 0
    module = (site / FILE).with_suffix(".abi3.so")
    module.touch()
    done = run("check", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["state"]) == (1, "applied")
    assert report["notes"] == [f"Python runs {module} and does not compare it with the source"]


def test_check_names_a_link_and_a_leftover(run: RunCommand, site: Path, tmp_path: Path):
    (site / FILE).rename(tmp_path / "shared")
    (site / FILE).symlink_to(tmp_path / "shared")
    (site / ".vllm-mamba-retire.json").touch()
    link, left = json.loads(run("check", "--json").stdout)["notes"]
    assert f"{site / FILE} is a symbolic link to {tmp_path / 'shared'}" in link
    assert left == f"{site / '.vllm-mamba-retire.json'} was left by a killed process; removed it"
    refused = run("apply", "--yes", "--no-probe")
    assert (refused.exit_code, link in refused.stderr) == (1, True)


def test_control_characters_of_a_tree_do_not_reach_the_terminal(run: RunCommand, site: Path):
    (site / "vllm/_version.py").write_text("version = '0.29.0\x1b[31m'\n")
    done = run("check")
    assert "\x1b" not in done.stderr
    assert r"0.29.0\x1b[31m" in done.stderr


# After the change nothing may fail: exit 0 and the patched tree belong together.


def make_record(site: Path, data: bytes | None) -> None:
    record = site / "vllm-0.29.0.dist-info/RECORD"
    record.parent.mkdir()
    os.mkfifo(record) if data is None else record.write_bytes(data)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (f"{FILE},sha256=abc,1\n".encode(), 1),
        (f"{FILE},,\n".encode(), 0),
        (f"{FILE}\n".encode(), 0),
        (b"\xff\xfe\0", 0),
        (b'"' + b"x" * 200_000, 0),
        (None, 0),  # a pipe that nobody writes to
    ],
)
def test_record_of_any_kind_does_no_harm(
    data: bytes | None, count: int, run: RunCommand, site: Path
):
    make_record(site, data)
    done = run("apply", "--yes", "--no-probe", "--json")
    assert (done.exit_code, (site / FILE).read_text()) == (0, PATCHED)
    notes = [note for note in json.loads(done.stdout)["notes"] if "RECORD" in note]
    assert len(notes) == count


def test_unreadable_folder_on_the_path_does_no_harm(
    run: RunCommand, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    is_file = Path.is_file

    def refuse(path: Path, **options: bool) -> bool:
        if path.is_relative_to(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path, **options)

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.syspath_prepend(str(tmp_path / "closed"))
    done = run("apply", "--yes", "--no-probe")
    assert (done.exit_code, (site / FILE).read_text()) == (0, PATCHED)


@pytest.mark.parametrize("sink", ["full disk", "closed pipe"])
def test_unwritable_report_does_not_change_the_exit_code(sink: str, run: RunCommand, site: Path):
    if sink == "full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    child = os.fork()
    if child == 0:
        os.dup2(out, 1)
        sys.stdout = os.fdopen(1, "w")
        try:
            app(["apply", "--target", str(site), "--yes", "--no-probe", "--json"])
        except SystemExit as done:
            sys.stdout.flush()
            os._exit(int(done.code or 0))
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (site / FILE).read_text() == PATCHED


@pytest.mark.parametrize("after_the_change", [False, True])
def test_ctrl_c_reports_what_the_tree_is(
    after_the_change: bool, run: RunCommand, site: Path, monkeypatch: pytest.MonkeyPatch
):
    change = patchset.change

    def interrupted(*arguments: Any, **options: Any) -> None:
        if after_the_change:
            change(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(patchset, "change", interrupted)
    report = json.loads(run("apply", "--yes", "--no-probe", "--json").stdout)
    if after_the_change:
        assert (report["state"], report["exit_code"]) == ("applied", 0)
        assert report["sentence"] == "interrupted, the tree is applied"
    else:
        assert (report["state"], report["exit_code"]) == ("pristine", 1)
        assert report["sentence"] == "interrupted, nothing was changed"


def test_no_vllm_is_a_usage_error(run: RunCommand, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    done = run("check", "--target", str(tmp_path / "empty"))
    assert done.exit_code == 2
    assert f"{tmp_path / 'empty'}: no vllm/" in done.stderr


def test_option_for_vllms_tests_is_gone_and_says_so():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vllm_mamba_retire.cli import main; main()",
            "apply",
            "--tests",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "No such option" in done.stderr
