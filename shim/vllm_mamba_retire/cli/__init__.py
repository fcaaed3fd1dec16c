"""The command ``vllm-mamba-retire``.

One module per subject. A module here may import typer and rich and nothing heavier: what a command
needs beyond that is imported when it runs, so that ``status`` and every ``--help`` answer at once.
"""

from __future__ import annotations

import importlib
import sys
import traceback

import typer

# command -> module here that defines a function of that name
COMMANDS: dict[str, str] = {
    "diff": "patchset",
    "apply": "patchset",
    "check": "patchset",
    "revert": "patchset",
    "replay": "replay",
    "plan": "plan",
    "status": "status",
    "verify": "verify",
    "support": "support",
    "inspect-image": "inspect_image",
}

app = typer.Typer(
    name="vllm-mamba-retire",
    help="Brings vLLM's Mamba state retirement fix (vllm#55450) to pinned vLLM 0.26-0.29.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for _command, _module in COMMANDS.items():
    _function = getattr(
        importlib.import_module(f".{_module}", __name__), _command.replace("-", "_")
    )
    app.command(_command)(_function)


@app.callback()
def _root() -> None:
    """Keeps every command a sub-command, however many there are."""


def main() -> None:
    """Run the command line: exit 0 is fine, 1 a finding, 2 a usage or internal error."""
    try:
        app()
    except Exception:
        # Python's own exit status here would be 1, which means a finding.
        traceback.print_exc()
        sys.exit(2)
