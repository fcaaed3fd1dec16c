"""What the pages state of the code, held against the code."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.docs.blocks import ROOT, Shell
from vllm_mamba_retire.verdict import Reason

DOCS = ROOT / "docs"
SOURCE = "\n".join(path.read_text() for path in (ROOT / "shim").rglob("*.py"))
COMMANDS = {
    "status": "status --json",
    "verify": "verify --json",
    "plan": "plan --block 1568 --budget 4096 --prompt 9000 --no-replay --json",
    "replay": "replay --block 1568 --prompt 9000 --json",
    "check": "check --json",
}


def test_environment_page_names_every_variable_of_the_package() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    used = set(re.findall(r'"(MAMBA_RETIRE(?:_[A-Z]+)*)"', SOURCE))
    assert "MAMBA_RETIRE" in used
    assert used <= set(re.findall(r"`(MAMBA_RETIRE(?:_[A-Z]+)*)`", page))


def test_every_verdict_is_explained() -> None:
    rows = (DOCS / "how-it-works.md").read_text().split("| verdict |")[1]
    explained = set(re.findall(r"`([a-z-]+)`", rows))
    assert {reason.value for reason in Reason} <= explained


@pytest.mark.parametrize("command", COMMANDS)
def test_json_page_names_every_key_of_a_document(command: str, shell: Shell) -> None:
    document = json.loads(shell(f"vllm-mamba-retire {COMMANDS[command]}", "0.29.0").stdout)
    page = (DOCS / "reference" / "json.md").read_text()
    sections = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    (section,) = (s for s in sections if f"`{command}" in s.partition("\n")[0])
    named = {key for row in section.splitlines() for key in _keys(row)}
    assert set(document) == named | {"schema"}


@pytest.mark.parametrize("command", ["status", "verify", "plan", "replay"])
def test_tables_fit_into_80_columns(command: str, shell: Shell) -> None:
    done = shell(
        f"COLUMNS=80 vllm-mamba-retire {COMMANDS[command].removesuffix(' --json')}", "0.29.0"
    )
    rows = [line for line in done.stdout.splitlines() if "   " in line or {"─", "━"} & set(line)]
    assert command == "status" or len(rows) > 3, done.stdout + done.stderr
    assert [line for line in rows if len(line) > 80 or "…" in line] == []


def test_drawing_is_of_what_the_release_does(shell: Shell) -> None:
    script = "import json; from tools.docs.drawings import measure; print(json.dumps(measure()))"
    done = shell(f"cd {ROOT} && MAMBA_RETIRE=off {sys.executable} -c '{script}'", "0.29.0")
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(
        (DOCS / "data" / "block-table.json").read_text()
    )


def _keys(row: str) -> list[str]:
    first = row.removeprefix("| ").partition(" | ")[0]
    return re.findall(r"`(\w+)`", first) if row.startswith("| `") else []
