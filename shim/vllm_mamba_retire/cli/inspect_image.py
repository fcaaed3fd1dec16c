"""``inspect-image``: the verdict on an image that is not running.

Prints and gives exit codes; how images are read is in `vllm_mamba_retire.images`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .text import one_line

if TYPE_CHECKING:
    from vllm_mamba_retire.images.inspection import Inspection

SCHEMA = 1


def inspect_image(
    image: Annotated[
        str | None,
        typer.Argument(help="Name, digest or id of an image that the engine has.", metavar="IMAGE"),
    ] = None,
    rootfs: Annotated[
        Path | None, typer.Option(help="Root of an unpacked image.", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="docker or podman; by default the one that answers.", show_default=False),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="amd64, arm64: refuse an image for another.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine output on stdout.")] = False,
) -> None:
    """Tell which vLLM an image would serve and whether it is fixed, without starting it.

    Nothing of the image is executed. Exit 0: patched, native or nothing to fix. Exit 1: a finding.
    Exit 2: the image cannot be read, has no vLLM or no Python.
    """
    if (image is None) == (rootfs is None):
        raise typer.BadParameter("give one of IMAGE and --rootfs")
    from vllm_mamba_retire.images.engine import Engine
    from vllm_mamba_retire.images.image import Config, ImageError, read_rootfs
    from vllm_mamba_retire.images.inspection import inspect

    try:
        if rootfs is not None:
            inspection = inspect(Config(str(rootfs)), read_rootfs(rootfs))
        else:
            inspection = inspect(*Engine.find(engine).read(str(image)))
        found = inspection.serving.architecture
        if architecture not in (None, found):
            raise ImageError(f"{inspection.config.name} is for {found}, not for {architecture}")  # noqa: TRY301
    except ImageError as error:
        if as_json:
            typer.echo(json.dumps({"schema": SCHEMA, "error": str(error)}))
        typer.secho(f"error: {one_line(error)}", err=True, fg="red")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, **inspection.to_data()}, indent=2))
    else:
        _show(inspection)
    raise typer.Exit(1 if inspection.finding else 0)


def _show(inspection: Inspection) -> None:
    from rich.console import Console

    data = inspection.to_data()
    vllm = data["vllm"]
    rows = {
        "image": data["image"],
        "id": data["image_id"],
        "digest": data["digest"],
        "platform": f"{data['architecture']}, Python {data['python']} ({data['interpreter']})",
        "vLLM": f"{vllm['version']} ({vllm['distribution']}) at {vllm['package']}",
        "manager": f"sha256 {vllm['manager_sha256']}",
        "also there": ", ".join(vllm["others"]),
        "this package": data["installed"] or "not installed",
    }
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name, value in rows.items():
        if value:
            console.print(f"{name:14}{one_line(value)}")
    console.print(inspection.reason, style="red" if inspection.finding else "green", end=": ")
    console.print(one_line(inspection.sentence))
    console.print(one_line(inspection.keep))
