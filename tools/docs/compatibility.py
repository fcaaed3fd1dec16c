"""Writes docs/compatibility.md from compat_matrix.yaml: ``python -m tools.docs.compatibility``.

Neighbouring releases with the same values share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from tools.table.rows import ROOT
from vllm_mamba_retire.releases import Finding, Matrix, Row, Status, load_matrix

PAGE = ROOT / "docs" / "compatibility.md"

_MEANING = {
    Status.ABSENT: "no align mode; not patched",
    Status.LATENT: "the walk has the flaw, but the release's scheduler does not reach it; not "
    "patched",
    Status.LIVE: "keeps states before null gaps; **patched**",
    Status.NATIVE: "vLLM carries the fix; not patched",
}


def page(matrix: Matrix) -> str:
    """Return the whole page."""
    return "\n".join(_lines(matrix))


def _lines(matrix: Matrix) -> Iterator[str]:
    fix = matrix.fix
    yield "# Compatibility"
    yield ""
    yield "<!-- Written from compat_matrix.yaml by `python -m tools.docs.compatibility`. -->"
    yield ""
    yield from _statuses(matrix)
    yield (
        f"The upstream change is {fix.upstream}, merged on {fix.merged}, first in vLLM "
        f"{fix.first_release}. The installed code decides, not the version string: code that is "
        "in no listed release is left as it is and reported as `drifted`."
    )
    yield ""
    yield from _images(matrix)
    yield from _products(matrix)
    yield from _evidence(matrix)
    yield from _maintainers(matrix)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _grouped(
    rows: Iterable[Row], cells: Callable[[Row], tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """One table row for each run of releases with the same cells."""
    for same, group in groupby(rows, cells):
        yield (_span([row.version for row in group]), *same)


def _span(versions: list[str]) -> str:
    if len(versions) < 3:
        return ", ".join(versions)
    return f"{versions[0]} - {versions[-1]} ({len(versions)})"


def _statuses(matrix: Matrix) -> Iterator[str]:
    yield from _table(
        ("vLLM", "status", "meaning"),
        _grouped(matrix.releases, lambda row: (row.status.value, _MEANING[row.status])),
    )


def _images(matrix: Matrix) -> Iterator[str]:
    yield "## Container images"
    yield ""
    yield (
        "In an untested image this project has run nothing. To check one, run "
        "`vllm-mamba-retire inspect-image`."
    )
    yield ""
    yield from _table(
        ("image", "accelerator", "tested"),
        (
            (
                f"`{image.repository}:{image.tag}`",
                f"{image.accelerator}, {image.architecture}",
                "; ".join(f"{each.run}: {each.result}" for each in image.evidence) or "untested",
            )
            for image in matrix.images
        ),
    )


def _products(matrix: Matrix) -> Iterator[str]:
    yield "## Other products that change the class"
    yield ""
    yield from _table(
        ("distribution", "what it does"),
        ((product.distribution, product.does) for product in matrix.products),
    )


def _evidence(matrix: Matrix) -> Iterator[str]:
    yield "## What was run"
    yield ""
    yield (
        "On the code of each release, on a CPU. A peak is the most live states of one request in "
        "one Mamba group, one figure per lag."
    )
    yield ""
    for run in dict.fromkeys(each.run for row in matrix.releases for each in row.evidence):
        yield f"{run[0].upper()}{run[1:]}:"
        yield ""
        found = {
            row.version: each for row in matrix.releases for each in row.evidence if each.run == run
        }
        rows = [row for row in matrix.releases if row.version in found]

        def cells(row: Row, found: dict[str, Finding] = found) -> tuple[str, ...]:
            each = found[row.version]
            return each.result, str(each.date), each.package

        yield from _table(("vLLM", "result", "date", "package"), _grouped(rows, cells))


def _maintainers(matrix: Matrix) -> Iterator[str]:
    yield "## For maintainers"
    yield ""
    yield "How each release frees blocks:"
    yield ""
    yield from _table(("vLLM", "blocks are freed", "clean-up", "arguments"), _shapes(matrix))
    yield (
        "*inline*: in `remove_skipped_blocks` of the base class. *inherited*: in an inherited "
        "`_remove_blocks_in_range`. *own*: in that of `MambaManager`. `compat_matrix.yaml` holds "
        "the hashes and the fingerprints."
    )
    yield ""
    yield "What each release requires, and its published wheels:"
    yield ""
    yield from _table(
        ("vLLM", "Python", "torch", "wheels"),
        _grouped(
            matrix.releases,
            lambda row: (f"`{row.requires_python}`", f"`{row.torch}`", _builds(row)),
        ),
    )
    yield "Every wheel was opened. Within a release, all have the same manager file."
    yield ""
    yield from _series(matrix)


def _shapes(matrix: Matrix) -> Iterator[tuple[str, ...]]:
    return _grouped(
        matrix.releases,
        lambda row: (
            row.hook.value if row.hook else "-",
            f"`{row.cleanup}`" if row.cleanup else "-",
            ", ".join(f"`{name}`" for name in row.arguments) or "-",
        ),
    )


def _builds(row: Row) -> str:
    rebuilt = sorted({tags[2] for w in row.wheels if len(tags := w.name.split("-")) == 6})
    return f"{len(row.wheels)}" + (f" (with rebuild {', '.join(rebuilt)})" if rebuilt else "")


def _series(matrix: Matrix) -> Iterator[str]:
    for name in dict.fromkeys(file.file for file in matrix.patches):
        yield f"The patch series change `{name}`:"
        yield ""
        yield from _table(
            ("vLLM", "sha256 before", "sha256 after"),
            (
                (file.release, f"`{file.sha256_before[:12]}`", f"`{file.sha256_after[:12]}`")
                for file in matrix.patches
                if file.file == name
            ),
        )


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(load_matrix()))
