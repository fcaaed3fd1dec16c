"""``verify``: runs the installed vLLM's own manager, stock and patched, and compares them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllm_mamba_retire import disarm

from .text import safe

if TYPE_CHECKING:
    from vllm_mamba_retire.verification import Verification

SCHEMA = 1


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove the verdict on the installed vLLM.

    Runs a probe and replays on it, stock and patched. Needs no GPU and no weights.

    Exit 0: proven. Exit 1: not proven. Exit 2: there is no vLLM, or it cannot run.
    """
    disarm()
    from vllm_mamba_retire.verification import verify as run

    seen = run()
    if as_json:
        typer.echo(json.dumps(_as_data(seen), indent=2))
    elif seen.problem is not None:
        typer.echo(f"Error: {safe(seen.problem)}", err=True)
    else:
        _show(seen)
    if seen.problem is not None:
        raise typer.Exit(2)
    raise typer.Exit(0 if seen.proven else 1)


def _as_data(seen: Verification) -> dict[str, Any]:
    from vllm_mamba_retire import __version__
    from vllm_mamba_retire.verification import BLOCK, BUDGET, LAGS, PROMPT, SPEC

    geometry = {"block": BLOCK, "budget": BUDGET, "prompt": PROMPT, "spec": SPEC, "lags": LAGS}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "proven": seen.proven,
        "sentence": seen.sentence,
        "geometry": geometry,
        "stock": msgspec.to_builtins(seen.stock),
        "patched": msgspec.to_builtins(seen.patched),
    }


def _show(seen: Verification) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from vllm_mamba_retire.verification import BLOCK, BUDGET, LAGS, PROMPT, SPEC, bound

    console = Console(soft_wrap=True, highlight=False, markup=False)
    stock, patched = seen.stock, seen.patched
    if patched.package is not None:
        console.print(f"vLLM {patched.vllm} at {patched.package}")
    console.print(str(patched.verdict))
    console.print(str(patched.keep))
    if stock.outcome or patched.outcome:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("", "stock", "patched", "at most"):
            table.add_column(name)
        outcomes = [side.outcome.value if side.outcome else "-" for side in (stock, patched)]
        table.add_row("state before a null gap", *outcomes, "")
        for at, lag in enumerate(LAGS):
            peaks = [str(side.peaks[at]) if side.peaks else "-" for side in (stock, patched)]
            table.add_row(f"peak states, lag {lag}", *peaks, str(bound(lag)))
        if stock.newest and patched.newest:
            table.add_row("the newest state", stock.newest.value, patched.newest.value, "")
        console.print(table)
        console.print(
            f"One Mamba group, block {BLOCK}, {SPEC} speculative blocks, budget {BUDGET}, "
            f"{PROMPT:,} tokens."
        )
    console.print(seen.sentence, style="green" if seen.proven else "red")
