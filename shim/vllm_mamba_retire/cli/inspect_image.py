"""``inspect-image``: the verdict on an image that is not running.

Talks to people and gives exit codes; how images are read is in `vllm_mamba_retire.images`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vllm_mamba_retire.images.config import Config
    from vllm_mamba_retire.images.inspection import Inspection
    from vllm_mamba_retire.images.tree import Tree

SCHEMA = 1


def inspect_image(
    image: Annotated[
        str | None,
        typer.Argument(help="Name, digest or id of an image that the engine has.", metavar="IMAGE"),
    ] = None,
    rootfs: Annotated[
        Path | None, typer.Option(help="Root of an unpacked image.", show_default=False)
    ] = None,
    tar: Annotated[
        Path | None,
        typer.Option(help="Archive by docker save, podman save or OCI.", show_default=False),
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
    if sum(source is not None for source in (image, rootfs, tar)) != 1:
        raise typer.BadParameter("give one of IMAGE, --rootfs and --tar")
    from vllm_mamba_retire.images.inspection import inspect
    from vllm_mamba_retire.images.tree import ImageError

    try:
        inspection = inspect(*_read(image, rootfs, tar, engine, architecture))
        _check(inspection, architecture)
    except ImageError as error:
        if as_json:
            typer.echo(json.dumps({"schema": SCHEMA, "error": str(error)}))
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, **inspection.to_data()}, indent=2))
    else:
        _show(inspection)
    raise typer.Exit(1 if inspection.finding else 0)


def _read(
    image: str | None,
    rootfs: Path | None,
    tar: Path | None,
    engine: str | None,
    architecture: str | None,
) -> tuple[Config, Tree]:
    from vllm_mamba_retire.images import archive, config, live
    from vllm_mamba_retire.images import rootfs as folder

    if rootfs is not None:
        return config.Config(str(rootfs)), folder.read_rootfs(rootfs)
    if tar is not None:
        return archive.read_archive(tar, architecture)
    assert image is not None
    return live.read_image(image, engine)


def _check(inspection: Inspection, architecture: str | None) -> None:
    from vllm_mamba_retire.images.tree import ImageError

    found = inspection.serving.architecture
    if architecture is not None and found != architecture:
        raise ImageError(f"{inspection.config.name} is for {found}, not for {architecture}")


def _show(inspection: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

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
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        if value:
            table.add_row(name, str(value))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    colour = "red" if inspection.finding else "green"
    console.print(f"[{colour}]{inspection.reason}[/{colour}]: {inspection.sentence}")
    if not inspection.serving.certain:
        console.print(f"{vllm['package']} is not on the search path of {data['interpreter']}.")
