"""``inspect-image``: shows the verdict on an image that is not running.

Prints and sets the exit status; `vllm_mamba_retire.images` reads the image.
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
        typer.Argument(help="Name, digest or id of a local image.", metavar="IMAGE"),
    ] = None,
    rootfs: Annotated[
        Path | None, typer.Option(help="Root folder of an unpacked image.", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="docker or podman. Default: the one that is there.", show_default=False),
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Refuse an image for another one: amd64, arm64.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which vLLM an image serves, and whether it is fixed.

    Nothing in the image is executed.

    Exit 0: patched, native or nothing to fix. Exit 1: a finding. Exit 2: the image cannot be read,
    or has no vLLM or no Python.
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
    # In the future tense: nothing of the image runs yet.
    headline = "will be patched" if inspection.reason == "patched" else inspection.reason
    console.print(headline, style="red" if inspection.finding else "green", end=": ")
    console.print(one_line(inspection.sentence))
    console.print(one_line(inspection.keep))
