"""docs/compatibility.md, written from compat_matrix.yaml: ``python -m lanes.compat_doc``."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_mamba_retire.matrix import Matrix, Row, Status, load_matrix

from .table import ROOT

PAGE = ROOT / "docs" / "compatibility.md"

_MEANING = {
    Status.ABSENT: "no align mode; left untouched",
    Status.LATENT: "the walk has the flaw, the shipped scheduler does not reach it; left untouched",
    Status.LIVE: "keeps states before null gaps; **patched**",
    Status.NATIVE: "carries the fix itself; left untouched",
}


def page(matrix: Matrix) -> str:
    """The whole page."""
    return "\n".join(_lines(matrix))


def _lines(matrix: Matrix) -> Iterator[str]:
    fix = matrix.fix
    yield "# Compatibility"
    yield ""
    yield "<!-- Written by `python -m lanes.compat_doc` from compat_matrix.yaml: edit that. -->"
    yield ""
    yield (
        f"The upstream change is {fix.upstream}, merged on {fix.merged}, first in vLLM "
        f"{fix.first_release}. What counts is the code that is installed, not its version: a "
        "source whose methods are not in the table is left alone and reported as `drifted`."
    )
    yield ""
    yield from _statuses(matrix)
    yield from _releases(matrix)
    yield from _evidence(matrix)
    yield from _series(matrix)
    yield from _images(matrix)
    yield from _products(matrix)


def _statuses(matrix: Matrix) -> Iterator[str]:
    yield "| status | releases | what it means |"
    yield "|---|---|---|"
    for status, meaning in _MEANING.items():
        rows = [row.version for row in matrix.rows if row.status is status]
        span = rows[0] if len(rows) == 1 else f"{rows[0]} - {rows[-1]} ({len(rows)})"
        yield f"| {status.value} | {span} | {meaning} |"
    yield ""


def _releases(matrix: Matrix) -> Iterator[str]:
    yield "## Releases"
    yield ""
    yield "| vLLM | status | blocks are freed | clean-up | arguments | Python | torch | wheels |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in matrix.rows:
        cells = (
            row.version,
            row.status.value,
            row.hook.value if row.hook else "-",
            f"`{row.cleanup}`" if row.cleanup else "-",
            ", ".join(f"`{name}`" for name in row.arguments) or "-",
            f"`{row.requires_python}`",
            f"`{row.torch}`",
            _builds(row),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        "Blocks are freed *inline* in the base's `remove_skipped_blocks`, in an *inherited* "
        "`_remove_blocks_in_range`, or in `MambaManager`'s *own*. Every published wheel was "
        "opened; within a release all have the same manager file. Names and hashes are in the "
        "table."
    )
    yield ""


def _builds(row: Row) -> str:
    rebuilt = sorted({tags[2] for w in row.wheels if len(tags := w.name.split("-")) == 6})
    return f"{len(row.wheels)}" + (f" (with rebuild {', '.join(rebuilt)})" if rebuilt else "")


def _evidence(matrix: Matrix) -> Iterator[str]:
    yield "## What was run"
    yield ""
    yield "Peaks are live states of one request in one Mamba group, one figure per lag."
    yield ""
    yield "| vLLM | check | result | date | package |"
    yield "|---|---|---|---|---|"
    for row in matrix.rows:
        for each in row.evidence:
            yield f"| {row.version} | {each.run} | {each.result} | {each.date} | {each.package} |"
    yield ""


def _series(matrix: Matrix) -> Iterator[str]:
    yield "## Patch series"
    yield ""
    yield "| vLLM | series | file | sha256 before | sha256 after |"
    yield "|---|---|---|---|---|"
    for file in matrix.patches:
        before = f"`{file.sha256_before[:12]}`" if file.sha256_before else "(new)"
        after = f"`{file.sha256_after[:12]}`"
        yield f"| {file.release} | {file.series} | `{file.file}` | {before} | {after} |"
    yield ""


def _images(matrix: Matrix) -> Iterator[str]:
    yield "## Container images"
    yield ""
    yield "| vLLM | image | accelerator | architecture | tested |"
    yield "|---|---|---|---|---|"
    for image in matrix.images:
        tested = "; ".join(f"{each.run}: {each.result}" for each in image.evidence) or "untested"
        name = f"`{image.repository}:{image.tag}`"
        cells = (image.release, name, image.accelerator, image.architecture, tested)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _products(matrix: Matrix) -> Iterator[str]:
    yield "## Other products that touch the class"
    yield ""
    yield "| distribution | what it does |"
    yield "|---|---|"
    for product in matrix.products:
        yield f"| {product.distribution} | {product.does} |"
    yield ""


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(load_matrix()))
