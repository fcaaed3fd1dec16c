"""Writes docs/compatibility.md from compat_matrix.yaml: ``python -m tools.docs.compatibility``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tools.table.rows import ROOT
from vllm_mamba_retire.releases import Matrix, Row, Status, load_matrix

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
    yield "<!-- Written from compat_matrix.yaml by `python -m tools.docs.compatibility`. -->"
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


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _statuses(matrix: Matrix) -> Iterator[str]:
    rows = []
    for status, meaning in _MEANING.items():
        of_it = [row.version for row in matrix.releases if row.status is status]
        span = of_it[0] if len(of_it) == 1 else f"{of_it[0]} - {of_it[-1]} ({len(of_it)})"
        rows.append((status.value, span, meaning))
    yield from _table(("status", "releases", "what it means"), rows)


def _releases(matrix: Matrix) -> Iterator[str]:
    yield "## Releases"
    yield ""
    yield from _table(
        (
            "vLLM",
            "status",
            "blocks are freed",
            "clean-up",
            "arguments",
            "Python",
            "torch",
            "wheels",
        ),
        (
            (
                row.version,
                row.status.value,
                row.hook.value if row.hook else "-",
                f"`{row.cleanup}`" if row.cleanup else "-",
                ", ".join(f"`{name}`" for name in row.arguments) or "-",
                f"`{row.requires_python}`",
                f"`{row.torch}`",
                _builds(row),
            )
            for row in matrix.releases
        ),
    )
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
    yield from _table(
        ("vLLM", "check", "result", "date", "package"),
        (
            (row.version, each.run, each.result, str(each.date), each.package)
            for row in matrix.releases
            for each in row.evidence
        ),
    )


def _series(matrix: Matrix) -> Iterator[str]:
    yield "## Patch series"
    yield ""
    yield from _table(
        ("vLLM", "series", "file", "sha256 before", "sha256 after"),
        (
            (
                file.release,
                file.series,
                f"`{file.file}`",
                f"`{file.sha256_before[:12]}`",
                f"`{file.sha256_after[:12]}`",
            )
            for file in matrix.patches
        ),
    )


def _images(matrix: Matrix) -> Iterator[str]:
    yield "## Container images"
    yield ""
    yield from _table(
        ("vLLM", "image", "accelerator", "architecture", "tested"),
        (
            (
                image.release,
                f"`{image.repository}:{image.tag}`",
                image.accelerator,
                image.architecture,
                "; ".join(f"{each.run}: {each.result}" for each in image.evidence) or "untested",
            )
            for image in matrix.images
        ),
    )


def _products(matrix: Matrix) -> Iterator[str]:
    yield "## Other products that touch the class"
    yield ""
    yield from _table(
        ("distribution", "what it does"),
        ((product.distribution, product.does) for product in matrix.products),
    )


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(load_matrix()))
