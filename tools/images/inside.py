"""Installs this package in a container, with the image's own Python, and checks the result.

This file runs in the container; what it needs is mounted read-only at `HOME`, and there is no
network. It prints one JSON document. Until the wheel is installed it uses only the standard
library.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

HOME = Path("/mamba-retire")
_LINES = 15
_ENDS = ("failure", "error", "skipped")  # of a test that did not pass, as pytest's XML names them

# As vLLM's processes do it: their plugin loader finds the entry point, and the manager is imported.
_START = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm, vllm.v1.core.single_type_kv_cache_manager as manager
import vllm_mamba_retire
from vllm_mamba_retire.probe import probe
record = vllm_mamba_retire.current()
print(json.dumps({
    "reason": record.verdict.reason.value if record else "off",
    "sentence": record.verdict.sentence if record else "",
    "probe": probe(manager).outcome.value,
    "manager": manager.__file__,
}))
"""


def main() -> None:
    """Run every step in a process of its own, because the verdict is fixed per process."""
    try:
        _install()
        found: dict[str, Any] = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "stock": _json([sys.executable, "-c", _START], MAMBA_RETIRE="off"),
            "started": _json([sys.executable, "-c", _START]),
            "verify": _verify(),
            "tests": _tests(),
        }
    except StepError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


class StepError(Exception):
    """A step failed; the message ends with what it printed."""


def _install() -> None:
    wheels = HOME / "wheels"
    # A pip in a wheel runs as it is: an image need not have one.
    (pip,) = wheels.glob("pip-*.whl")
    _run(
        [
            *(sys.executable, str(pip / "pip"), "install", "--quiet", "--no-index"),
            *(f"--find-links={wheels}", "vllm-mamba-retire", "pytest", "hypothesis"),
        ],
        PIP_BREAK_SYSTEM_PACKAGES="1",  # it is the system's Python that serves
        PIP_ROOT_USER_ACTION="ignore",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )


def _verify() -> Any:
    code = "from vllm_mamba_retire.cli import main; main()"
    done = _run([sys.executable, "-c", code, "verify", "--json"], fine=(0, 1))
    return {"exit": done.returncode, **json.loads(done.stdout)}


def _tests() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        _run(
            [
                *(sys.executable, "-m", "pytest", str(HOME / "tests" / "release"), "-q"),
                *(f"--junitxml={results}", "-p", "no:cacheprovider"),
                f"--rootdir={HOME / 'tests'}",
            ],
            fine=(0, 1),
        )
        cases = list(ET.parse(results).getroot().iter("testcase"))
    ended = {kind: [case for case in cases if case.find(kind) is not None] for kind in _ENDS}
    return {
        "tests": len(cases),
        "skipped": len(ended["skipped"]),
        "failed": [case.get("name") for kind in ("failure", "error") for case in ended[kind]],
    }


def _json(command: list[str], **environment: str) -> Any:
    # vLLM logs to stdout, too; the answer is the last line.
    return json.loads(_run(command, (0,), **environment).stdout.splitlines()[-1])


def _run(
    command: list[str], fine: tuple[int, ...] = (0,), **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd="/tmp",  # `-c` puts where it starts on the path
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in fine:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LINES:])
        raise StepError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return done


if __name__ == "__main__":
    main()
