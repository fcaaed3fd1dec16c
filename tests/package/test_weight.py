"""What a vLLM process, and somebody who asks for help, has to load of this package."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_mamba_retire.cli import COMMANDS

COMMAND_LINE = {"click", "rich", "typer", "unidiff"}
HEAVY = {"matplotlib", "numpy", "ray", "torch", "transformers", "vllm"}
REPORT = "import json, sys; before = set(sys.modules)\n{code}\nprint(json.dumps([*sys.modules]))"


def _loaded(code: str) -> set[str]:
    """Modules in a fresh interpreter that are not there without `code`."""

    def modules(lines: str) -> set[str]:
        run = [sys.executable, "-c", REPORT.format(code=lines)]
        printed = subprocess.check_output(run, text=True, stderr=subprocess.STDOUT)
        return set(json.loads(printed.splitlines()[-1]))

    return modules(code) - modules("")


def _roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_importing_it_loads_itself_and_nothing_else() -> None:
    own = {f"vllm_mamba_retire{part}" for part in ("", "._version", ".names")}
    assert _loaded("import __future__, vllm_mamba_retire") - {"__future__"} == own


def test_plugin_loader_imports_neither_cli_nor_heavy_modules() -> None:
    loaded = _loaded("from vllm_mamba_retire.plugin import register; register()")
    assert "vllm_mamba_retire.plugin" in loaded
    assert not _roots(loaded) & (COMMAND_LINE | HEAVY)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(command: str) -> None:
    arguments = [*([command] if command else []), "--help"]
    code = (
        "from vllm_mamba_retire.cli import app\n"
        f"try: app({arguments})\nexcept SystemExit as end: assert end.code in (0, None), end.code"
    )
    loaded = _loaded(code)
    assert "typer" in loaded
    assert not _roots(loaded) & HEAVY
