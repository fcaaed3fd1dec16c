"""The command ``vllm-mamba-retire``.

One module per subject. A module here may import typer and rich and nothing heavier: what a command
needs beyond that is imported when it runs, so that ``status`` and every ``--help`` start quickly.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Annotated

import typer

from vllm_mamba_retire._version import __version__

NAME = "vllm-mamba-retire"
# command -> module here that defines a function of that name
COMMANDS: dict[str, str] = {
    "status": "status",
    "verify": "verify",
    "plan": "plan",
    "replay": "replay",
    "inspect-image": "inspect_image",
    "support": "support",
    "diff": "patchset",
    "apply": "patchset",
    "check": "patchset",
    "revert": "patchset",
}

app = typer.Typer(
    name=NAME,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing is cut off in a narrow terminal
)

for _command, _module in COMMANDS.items():
    _function = getattr(
        importlib.import_module(f".{_module}", __name__), _command.replace("-", "_")
    )
    app.command(_command)(_function)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Bring vLLM's Mamba state retirement fix (vllm#55450) to pinned vLLM 0.26-0.29.

    Exit status of every command: 0 fine, 1 a finding, 2 a usage or internal error.
    """


def main() -> None:
    """Run the command line: exit 0 is fine, 1 a finding, 2 a usage or internal error."""
    try:
        app(prog_name=NAME)
    except Exception:
        # Python's own exit status here would be 1, which means a finding.
        traceback.print_exc()
        sys.exit(2)
