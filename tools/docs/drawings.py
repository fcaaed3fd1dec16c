"""Draws docs/images, except for the demonstration's, which ``nox -s demo -- --save`` renews.

- block-table.png: the block table of one long prompt, chunk by chunk, stock and fixed. ``--replay``
  measures its data on the release on the path first;
- kept.png: tokens computed on each side of some cases of docs/prefix-cache.md, likewise;
- plan.png: what `plan` draws for the server of docs/affected.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.cases import read_cases
from vllm_mamba_retire.replay.drawing import save
from vllm_mamba_retire.replay.manager import block_tables, chunk_ends
from vllm_mamba_retire.replay.sides import SIDES, compare

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "data" / "block-table.json"
DRAWING = DOCS / "images" / "block-table.png"
KEPT_DATA, KEPT_DRAWING = DOCS / "data" / "kept.json", DOCS / "images" / "kept.png"
CASES = DOCS.parent / "tests" / "cases"
SHOWN = ("next-dense-240", "next-0-240", "turns-under-pressure", "turns-mtp-110")
# Two blocks a chunk, and one chunk in flight: the smallest prompt on which the difference grows.
GEOMETRY = {"block": 4, "spec": 0, "budget": 8, "prompt": 40, "lag": 1}
AFFECTED = 1  # exit code of `plan`
_NEEDED, _KEPT, _NULL = "#20639b", "#c1442e", "#e8e8e8"


def main() -> int:
    """Draw; with ``--replay`` measure first."""
    parser = argparse.ArgumentParser(prog="nox -s charts --", description=__doc__)
    parser.add_argument("--replay", action="store_true", help="renew the data first")
    if parser.parse_args().replay:
        DATA.write_text(json.dumps(measure()) + "\n")
        KEPT_DATA.write_text(json.dumps(measure_kept()) + "\n")
    draw(json.loads(DATA.read_text()), DRAWING)
    draw_kept(json.loads(KEPT_DATA.read_text()), KEPT_DRAWING)
    plan = DOCS / "images" / "plan.png"
    command = [sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"]
    done = subprocess.run([*command, *plan_on_the_page(), f"--chart={plan}"], check=False)
    if done.returncode != AFFECTED:
        return done.returncode or 1
    print(f"drawn: {DRAWING}, {KEPT_DRAWING}, {plan}")
    return 0


def plan_on_the_page() -> list[str]:
    """Return the arguments of the `plan` whose output the page shows."""
    page = (DOCS / "affected.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("$ vllm-mamba-retire plan "))
    return shlex.split(line)[2:]


def measure() -> dict[str, Any]:
    """Return the tables after every chunk, by the manager of the vLLM on the path."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    from vllm_mamba_retire import binding
    from vllm_mamba_retire.target import find_target

    target = find_target()
    binding.uninstall(MambaManager)
    stock = list(block_tables(**GEOMETRY))
    binding.install(MambaManager)
    fixed = list(block_tables(**GEOMETRY))
    return {
        "vllm": target.version.partition("+")[0] if target and target.version else "",
        **GEOMETRY,
        "chunk_ends": chunk_ends(GEOMETRY["block"], GEOMETRY["budget"], GEOMETRY["prompt"]),
        "stock": stock,
        "fixed": fixed,
    }


def measure_kept() -> dict[str, Any]:
    """Return the tokens computed in the shown cases, by side, on the vLLM on the path."""
    files = (CASES / "next_turn.yaml", CASES / "prefix_cache.yaml")
    cases = {case.id: case for file in files for case in read_cases(file)}
    replayed = compare([cases[name].scenarios[0] for name in SHOWN])
    return {
        "vllm": replayed[0].stock.vllm.partition("+")[0],
        "tokens": {
            name: {side: run.scheduled_tokens for side, run in each.runs.items()}
            for name, each in zip(SHOWN, replayed, strict=True)
        },
    }


def draw_kept(data: dict[str, Any], path: Path) -> None:
    """Draw a bar per side for each case; longer is more work for the same requests."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip((side.name for side in SIDES), ("#b0b0b0", _KEPT, _NEEDED), strict=True))
    height = 1 / (len(SIDES) + 1)
    for row, sides in enumerate(data["tokens"].values()):
        for place, (name, tokens) in enumerate(sides.items()):
            label = name if row == 0 else None
            bar = axes.barh(row + place * height, tokens, height, color=colours[name], label=label)
            axes.bar_label(bar, [f"{tokens:,}"], fontsize=8, padding=3)
    axes.set(
        title=f"vLLM {data['vllm']}: tokens computed for the same requests",
        yticks=[row + height for row in range(len(data["tokens"]))],
        yticklabels=list(data["tokens"]),
        xticks=[],
    )
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False)
    save(figure, path)


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw one row of blocks per chunk, stock on the left, fixed on the right."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(10, 3.9), layout="constrained")
    for axes, side in zip(figure.subplots(1, 2), ("stock", "fixed"), strict=True):
        for row, table in enumerate(data[side]):
            for column, state in enumerate(table):
                needed = data["fixed"][row][column] is not None
                colour = _NULL if state is None else _NEEDED if needed else _KEPT
                axes.add_patch(Rectangle((column, row), 0.92, 0.84, color=colour, lw=0))
                text, ink = ("null", "0.5") if state is None else (str(state), "white")
                middle = (column + 0.46, row + 0.44)
                axes.annotate(text, middle, color=ink, fontsize=8, ha="center", va="center")
            live = sum(state is not None for state in table)
            axes.annotate(f"{live}", (len(data[side][-1]) + 0.3, row + 0.44), va="center")
        axes.set(
            title="stock" if side == "stock" else "with the fix",
            xlim=(-0.1, len(data[side][-1]) + 1.4),
            ylim=(len(data[side]), -0.1),
            xlabel="position in the block table (right: live states)",
            xticks=[column + 0.46 for column in range(len(data[side][-1]))],
            xticklabels=range(len(data[side][-1])),
            yticks=[row + 0.44 for row in range(len(data[side]))],
            yticklabels=[f"chunk {row + 1}" for row in range(len(data[side]))],
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.suptitle(
        f"vLLM {data['vllm']}: block {data['block']}, budget {data['budget']} tokens, one chunk in "
        "flight; numbers are block ids, red is kept though no longer needed",
        fontsize=10,
    )
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
