"""Writes docs/proof.md and docs/data/proof.json from the results of the runs.

``python -m tools.proof.page RESULTS DOCS``. Every number in the page is from the JSON files that
the runs wrote; the page names each part that was not run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Data = dict[str, Any]
_ROUNDS_FOR_MEMORY = 40
_SINGLE = ("mutants", "disk-mutants", "soak")

_HEAD = """\
# Proof

A state that is freed too early gives silent wrong output, not a crash. The results on this page
come from real vLLM releases with version {version} of this package. The sessions `mutants`,
`upstream-tests` and `soak` store their results in the cache. `nox -s proof` runs the comparison, a
million steps per leaking release, and writes this page and `data/proof.json`.
"""

_DIFFERENTIAL = """\
## Comparison with 0.30.0

A generator makes random sequences of operations: admit (with prefix hits), schedule a chunk or a
decode step, settle it and reject drafts, retire, finish or abort with steps in flight, preempt,
resume, roll computed tokens back, pop now and free later, drop the prefix cache. One to three
Mamba groups share a pool of 16 to 96 blocks with an attention group. Up to four steps are in
flight. After every operation these must be equal: the manager's answers, all block tables, all
reference counts, the order of the free queue, the hash of every block.

| compared with | geometries | what is left out, and why |
|---|---|---|
| `native`: 0.30.0 itself | dense retention, hits of whole blocks, up to five draft tokens | \
everything that the live releases and 0.30.0 do not share |
| `wide`: 0.30.0 itself | also sparse retention and partial hits, or else an EAGLE drafter | an \
EAGLE drafter together with one of the two: the older release differs there also with 0.30.0's \
own method, because 0.30.0 changed which states such a prompt keeps and where its tail is cached \
|
| `graft`: 0.30.0's method on the release's own code | everything | nothing; the method is read \
from an installed 0.30.0 when the comparison runs |

KV connectors, encoder blocks and the worker are not compared. One intended difference cannot occur
here, because no scheduler does it: if a table is replaced without `pop_blocks_for_free`, 0.30.0
continues from the old watermark and never frees the first states of the new table. In this package
the watermark belongs to the table and starts at 0; `tests/release/test_retirement.py` shows both.
No sequence showed a fault of 0.30.0.

"Ended early" counts sequences of 200 steps in which vLLM raised the same error on both sides, an
assertion in `allocate_new_blocks`. They count with their whole length.
`tests/differential/test_scheduler.py` compares 25 scenarios step by step with each release's own
scheduler.
"""


_POISON = """\
## Freed states overwritten

In a real engine, every freed state is overwritten at once, and a live table that refers to a free
block is an error. The answers are compared token by token with those of a stock engine and of a
pool in which nothing is reused. The controls are mutants that free a state too early
(`tests/engine/test_poisoned_pool.py`, `nox -s engine`).
"""


def collect(results: Path) -> Data:
    """Read the results of the runs."""
    data: Data = {
        "differential": _merged(_per_release(results, "differential")),
        "upstream": _per_release(results, "upstream"),
    }
    for name in _SINGLE:
        path = results / f"{name}.json"
        data[name] = json.loads(path.read_text()) if path.exists() else None
    parts = [*data["differential"], *data["upstream"], *(data[name] for name in _SINGLE)]
    versions = {part["version"] for part in parts if part}
    if len(versions) != 1:
        raise SystemExit(f"the runs are of versions {sorted(versions)}; run them again")
    for done in data["upstream"]:
        done["left out"] = {why: len(names) for why, names in done["left out"].items()}
    for name in ("mutants", "disk-mutants"):
        data[name] = data[name] and _shown(data[name])
    return {"version": versions.pop(), **data}


def _shown(done: Data) -> Data:
    """Reduce the mutants to what the page shows: their number, and the ones that it names."""
    fates = done["mutants"]
    named = [fate for fate in fates if _is_wrong_fix(fate["mutant"]) or not fate["killed_by"]]
    return {**done, "all": len(fates), "mutants": named}


def _is_wrong_fix(mutant: str) -> bool:
    return mutant.startswith("wrong fix")


def _per_release(results: Path, part: str) -> list[Data]:
    paths = sorted(results.glob(f"{part}-*.json"), reverse=True)
    return [json.loads(path.read_text()) for path in paths]


def _merged(parts: list[Data]) -> list[Data]:
    """Merge the comparisons of several runs into one entry per release."""
    merged: dict[str, Data] = {}
    for part in parts:
        known = merged.setdefault(part["release"], {**part, "comparisons": []})
        known["comparisons"] += part["comparisons"]
        if known["version"] != part["version"]:
            raise SystemExit(f"{part['release']} was compared by different versions; run it again")
    return list(merged.values())


def render(data: Data) -> str:
    """Return the text of the page."""
    return "\n".join(_sections(data)).rstrip() + "\n"


def _sections(data: Data) -> Iterator[str]:
    yield _HEAD.format(version=data["version"])
    yield _DIFFERENTIAL
    yield from _differential(data["differential"])
    yield "## Mutants\n"
    yield from _mutants(data["mutants"], "The patch: `retirement.py`, `binding.py`, `verdict.py`")
    yield from _mutants(data["disk-mutants"], "The series on disk")
    yield from _upstream(data["upstream"])
    yield _POISON
    yield from _soak(data["soak"])


def _differential(releases: list[Data]) -> Iterator[str]:
    rows = []
    for release in releases:
        for done in release["comparisons"]:
            first, last = done["seeds"]
            rows.append(
                (
                    release["release"],
                    done["versions"][1] if done["scope"] != "graft" else "graft",
                    done["scope"],
                    f"{first}-{last}",
                    f"{done['steps']:,}",
                    done["raised"],
                    f"{done['counters']['states_stock_would_keep']:,}",
                    len(done["different"]),
                )
            )
    head = ("release", "with", "scope", "seeds", "steps equal", "ended early")
    yield from _table((*head, "states freed beyond a gap", "sequences that differ"), rows)


def _mutants(done: Data | None, title: str) -> Iterator[str]:
    if done is None:
        yield f"{title}: not run.\n"
        return
    fates = done["mutants"]
    survivors = [fate for fate in fates if not fate["killed_by"]]
    killed = done["all"] - len(survivors)
    yield f"{title}, on {done['release']}: {killed} of {done['all']} killed.\n"
    wrong = [fate for fate in fates if _is_wrong_fix(fate["mutant"])]
    if wrong:
        yield "Wrong fixes that look right. Most of them pass vLLM's own tests:\n"
        names = [(fate["mutant"].split(": ", 1)[1], _code(fate["killed_by"])) for fate in wrong]
        yield from _table(("wrong fix", "killed by"), names)
    if survivors:
        rows = [(_code(fate["mutant"]), fate["excuse"] or "**unexplained**") for fate in survivors]
        yield from _table(("survivor", "reason"), rows)


def _upstream(releases: list[Data]) -> Iterator[str]:
    yield (
        "## vLLM's own tests\n\n"
        "Each release's tests of its KV cache and scheduler, from its source archive, run stock "
        "and patched.\nThe same tests must pass. 0.30.0's seven tests for the fix run on the older "
        "releases too.\n\nUpstream's GPU step table "
        "(`tests/v1/e2e/general/test_mamba_prefix_cache.py`) must differ in one step on\na patched "
        "release: block 4 in the last step of async `prompt_10_block_size`. Upstream changed this "
        "line\nwith the fix (`nox -s steps`).\n"
    )
    if not releases:
        yield "Not run.\n"
        return
    rows = []
    for done in releases:
        stock, patched = done["stock"], done["patched"]
        rows.append(
            (
                done["release"],
                f"{stock['passed']} of {stock['ran']}",
                f"{patched['passed']} of {patched['ran']}",
                f"{stock['native tests passed']} of {stock['native tests']}",
                f"{patched['native tests passed']} of {patched['native tests']}",
                "; ".join(done["faults"]) or "none",
            )
        )
    head = ("release", "stock", "patched", "0.30.0's, stock", "0.30.0's, patched", "faults")
    yield from _table(head, rows)
    yield from _left_out(releases)


def _left_out(releases: list[Data]) -> Iterator[str]:
    counts: dict[str, list[str]] = {}
    for done in releases:
        for reason, count in done["left out"].items():
            counts.setdefault(reason, []).append(f"{done['release']}: {count}")
    if counts:
        yield "Skipped on both sides (`tools/proof/upstream_plugin.py` says which):\n"
        yield from _table(("reason", "tests"), [(why, ", ".join(n)) for why, n in counts.items()])


def _soak(done: Data | None) -> Iterator[str]:
    yield "## Soak\n"
    if done is None:
        yield "Not run.\n"
        return
    if done["rounds"] < _ROUNDS_FOR_MEMORY:
        yield "Too short to tell whether memory is flat.\n"
    yield from _table(("what", "value"), [(k, v) for k, v in done.items() if k != "version"])


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    yield "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _code(text: str | None) -> str:
    # A pipe would end the table's cell.
    return "**nothing**" if text is None else f"`{text}`".replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("docs", type=Path)
    asked = parser.parse_args()
    data = collect(asked.results)
    (asked.docs / "data").mkdir(parents=True, exist_ok=True)
    (asked.docs / "data" / "proof.json").write_text(json.dumps(data, indent=1) + "\n")
    (asked.docs / "proof.md").write_text(render(data))


if __name__ == "__main__":
    main()
