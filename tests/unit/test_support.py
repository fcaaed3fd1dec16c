"""The text for a bug report says what maintainers need, and nothing that must not be public."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from vllm_mamba_retire import records
from vllm_mamba_retire.cli import app
from vllm_mamba_retire.cli.redaction import redact
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

HOST = "gpu-node-17.corp.example"
# What must never be in a report: value -> where it is planted.
SECRETS = {
    "hf_QQQQQQQQQQQQQQQQ": "environment",
    "sk-live-WWWWWWWW": "variable of ours",
    "EEEEEEEE": "variable that we do not know",
    "ALICE": "home folder",
    "the patient has": "prompt in the log",
    "sk-RRRRRRRR": "arguments in the log",
    "acme-secret-model": "model in the log",
    "gpu-node-17": "host name",
    "10.1.2.3": "address",
    "TTTTTTTT@corp.example": "user of a URL",
}
LOG = f"""\
(APIServer pid=7) INFO 12-03 12:30:31 [api_server.py:1] vLLM API server version 0.29.0
(APIServer pid=7) INFO 12-03 12:30:31 [utils.py:1] non-default args: {{'model': \
'/home/ALICE/acme-secret-model', 'api_key': ['sk-RRRRRRRR'], 'max_model_len': 65536, \
'max_num_batched_tokens': 8192, 'host': '{HOST}'}}
(EngineCore pid=9) WARNING 12-03 12:30:32 [activation.py:1] vllm-mamba-retire 0.1.0: patched: \
vLLM 0.29.0 retires. (vLLM 0.29.0 at /home/ALICE/x.py, pid 9)
(APIServer pid=7) INFO 12-03 12:30:33 [logger.py:1] Received request cmpl-1: prompt: 'the patient \
has vllm-mamba-retire 0.1.0: failed: sk-RRRRRRRR'
(EngineCore pid=9) INFO 12-03 12:30:33 [interface.py:1] Setting attention block size to 1568 tokens
"""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Secrets in every place that the report is made from; the log of a server."""
    home = tmp_path / "ALICE"
    home.mkdir()
    real = os.uname()
    monkeypatch.setattr(os, "uname", lambda: _Renamed(real))
    for name, value in {
        "HOME": str(home),
        "USER": "ALICE",
        "LOGNAME": "ALICE",
        "MAMBA_RETIRE_DIR": str(home / "run"),
        "MAMBA_RETIRE": "require",
        "MAMBA_RETIRE_KEEP": "sk-live-WWWWWWWW",
        "MAMBA_RETIRE_NEW": "EEEEEEEE",
        "VLLM_PLUGINS": "mamba_retire,x=https://TTTTTTTT@corp.example/10.1.2.3",
        "HF_TOKEN": "hf_QQQQQQQQQQQQQQQQ",
    }.items():
        monkeypatch.setenv(name, value)
    sentence = f"{home}/vllm.py on {HOST} (10.1.2.3) was replaced by hf_QQQQQQQQQQQQQQQQ."
    record = Record.of(Verdict(Reason.CONFLICT, sentence), None, Counters(states_freed=7))
    records.keep(replace(record, manager_file=str(home / "m.py"), vllm="0.29.0"))
    log = tmp_path / "server.log"
    log.write_text(LOG)
    yield log
    records.withdraw()


class _Renamed:
    """What `os.uname` answers on another host."""

    def __init__(self, real: os.uname_result) -> None:
        self.real, self.nodename = real, HOST

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.real)


def report(*options: str) -> str:
    done = CliRunner().invoke(app, ["support", *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_report_holds_no_secret_no_prompt_and_no_name(planted: Path) -> None:
    text = report("--log", str(planted))
    assert [value for value in SECRETS if value in text] == []


def test_a_report_holds_what_maintainers_need(planted: Path) -> None:
    text = report("--log", str(planted))
    for line in (
        "MAMBA_RETIRE=require",
        "MAMBA_RETIRE_NEW is set; this version does not read it",
        "budget: 8192",
        "block: 1568",
        "version: 0.29.0",
        "verdicts logged: patched",
    ):
        assert line in text.splitlines()
    assert "conflict" in text
    assert "prometheus-client " in text


def test_names_and_paths_stay_in_where_that_is_requested(planted: Path) -> None:
    text = report("--host-names")
    assert HOST in text
    assert f"MAMBA_RETIRE_DIR={planted.parent / 'ALICE' / 'run'}" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "at /home/a/venv/lib/python3.11/site-packages/vllm/v1/x.py,",
            ".../site-packages/vllm/v1/x.py",
        ),
        ("/opt/a/bin/python3.11, Python 3.11", ".../python3.11, Python"),
        ("sha256 " + "0a" * 32, "sha256 " + "0a" * 32),
        ("max_num_batched_tokens=8192", "max_num_batched_tokens=8192"),
        ("vllm-mamba-retire 0.1.0: patched", "vllm-mamba-retire 0.1.0: patched"),
    ],
)
def test_what_is_harmless_stays(text: str, expected: str) -> None:
    assert expected in redact(text)


@pytest.mark.parametrize(
    "secret",
    [
        "--api-key=QQQQ",
        "Authorization: Bearer QQQQ",
        "hf_QQQQQQQQ",
        "ghp_QQQQQQQQ",
        "QQQQ1234567890QQQQ1234567890QQQQ1234567890",
        "https://QQQQ.example/x",
        "~/QQQQ/x.txt",
        "../QQQQ/models",
        "QQQQ@example.org",
    ],
)
def test_what_looks_like_a_secret_or_a_name_goes(secret: str) -> None:
    assert "QQQQ" not in redact(f"before {secret} after")


def test_the_name_of_the_user_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    assert redact("owned by mallory") == "owned by <name>"


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["support", "--log", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "none" in done.output
