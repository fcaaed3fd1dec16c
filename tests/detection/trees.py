"""Trees as people make them: a release, a change, and the verdict that is right for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.detection.sites import LATENT, LIVE, NATIVE, SERIES, Site, apply
from vllm_mamba_retire.target import MANAGER_FILE

# The fix by hand: other names, no watermark, other comments.
BY_HAND = """
    def _remove_blocks_in_range(self, request_id, first_block, last_block):
        # Backported for our own image.
        if self.mamba_cache_mode != "align":
            return super()._remove_blocks_in_range(request_id, first_block, last_block)
        table, old = self.req_to_blocks[request_id], []
        for i in range(min(last_block, len(table)) - 1, first_block - 1, -1):
            if table[i] is not self._null_block:
                old.append(table[i])
                table[i] = self._null_block
        self.block_pool.free_blocks(old)
"""
# With a watermark that nobody clears when the request ends.
WITHOUT_CLEAN_UP = """
    def _remove_blocks_in_range(self, request_id, first_block, last_block):
        seen = self.__dict__.setdefault("_seen", {})
        table, old = self.req_to_blocks[request_id], []
        for i in range(min(last_block, len(table)) - 1, seen.get(request_id, 0) - 1, -1):
            if table[i] is not self._null_block:
                old.append(table[i])
                table[i] = self._null_block
        seen[request_id] = last_block
        self.block_pool.free_blocks(old)
"""
POP = "\n    def pop_blocks_for_free(self, request_id: str)"
LINE = "            self._allocated_block_reqs.discard(request_id)\n"
BASE_WALK = "            if blocks[i] == self._null_block:\n                break\n"
CALL = "            total_computed_tokens,\n            num_prompt_tokens="


@dataclass(frozen=True)
class ChangedRelease:
    """A changed release.

    Attributes:
        change: makes the change in a copy of the release.
        reason: code of the right verdict.
        release: what is changed.
        allow_drift: ``MAMBA_RETIRE_ALLOW_DRIFT``.
    """

    change: Callable[[Site], object]
    reason: str
    release: str = LIVE
    allow_drift: str | None = None


def edit(before: str, after: str) -> Callable[[Site], None]:
    return lambda site: site.edit_manager((before, after))


def in_class(method: str, owner: str = "MambaManager") -> Callable[[Site], None]:
    """Adds a method to a class, in front of its own `pop_blocks_for_free`."""

    def change(site: Site) -> None:
        text = site.manager.read_text()
        at = text.index(POP, text.index(f"\nclass {owner}("))
        site.write_manager(text[:at] + method + text[at:])

    return change


def in_base(site: Site) -> None:
    """The watermark in the base class, where vLLM's own walk was."""
    in_class(WITHOUT_CLEAN_UP, "SingleTypeKVCacheManager")(site)
    text = site.manager.read_text()
    site.write_manager(text.replace("def _remove_blocks_in_range(\n", "def _unused(\n", 1))


def as_function(method: str) -> str:
    return "\n".join(line[4:] for line in method.splitlines()).replace("super()", "super(M, self)")


def behind_class(code: str) -> Callable[[Site], None]:
    """Adds lines at the end of the manager file."""
    return lambda site: site.write_manager(f"{site.manager.read_text()}\n{code}\n")


def in_front_of_class(code: str, before: str, after: str) -> Callable[[Site], None]:
    """Adds lines in front of the class and changes its first line."""
    text = "\nclass MambaManager(SingleTypeKVCacheManager):"
    return edit(text, f"\n{code}\n\n{before}{after}")


def series(site: Site, *hunks: int) -> None:
    """Applies the series, or the hunks of it that are named."""
    patch = next(SERIES.glob("0001-*.patch")).read_text()
    head, *parts = patch.split("\n@@ ")
    assert len(parts) == 2
    chosen = [parts[hunk].rstrip() for hunk in hunks or (0, 1)]
    apply(site, "\n@@ ".join([head, *chosen]) + "\n")


def with_tabs(site: Site) -> None:
    blocks = re.compile(r"^(?: {4})+", re.MULTILINE)
    text = blocks.sub(lambda found: "\t" * (len(found[0]) // 4), site.manager.read_text())
    compile(text, MANAGER_FILE.name, "exec")
    site.write_manager(text)


def in_latin_1(site: Site) -> None:
    text = f"# -*- coding: latin-1 -*-\n# \xe9\n{site.manager.read_text()}"
    site.write_manager(text.encode("latin-1", "replace"))


def hand_picked_basis(site: Site) -> None:
    """The lines of vllm#47728 that matter, on a release that is safe without them."""
    site.edit(
        MANAGER_FILE.parent / "kv_cache_manager.py",
        (CALL, CALL.replace("total_computed_tokens", "total_computed_tokens - request.in_flight")),
    )


_MODULE_LEVEL = as_function(BY_HAND).replace("super(M, self)", "super(MambaManager, self)")
_ASSIGN = "MambaManager._remove_blocks_in_range = _remove_blocks_in_range"
_MIXIN = f"class _Fix:\n{BY_HAND}"
_DECORATOR = f"""
def fixed(M):
{BY_HAND.replace("super()", "super(M, self)")}
    M._remove_blocks_in_range = _remove_blocks_in_range
    return M
"""

TREES = {
    "live": ChangedRelease(lambda site: None, "patched"),
    "latent": ChangedRelease(lambda site: None, "latent", LATENT),
    "native": ChangedRelease(lambda site: None, "native", NATIVE),
    "other version": ChangedRelease(
        lambda site: site.call_itself("0.11.2.dev280+g0123abc"), "patched"
    ),
    "code beside the class": ChangedRelease(
        behind_class("def somebodys():\n    return 1"), "patched"
    ),
    "a remark": ChangedRelease(edit(LINE, f"            # A remark.\n{LINE}"), "patched"),
    "byte order mark": ChangedRelease(
        lambda site: site.write_manager(b"\xef\xbb\xbf" + site.manager.read_bytes()), "patched"
    ),
    "tabs": ChangedRelease(with_tabs, "patched"),
    "latin-1": ChangedRelease(in_latin_1, "patched"),
    "native with tabs": ChangedRelease(with_tabs, "native", NATIVE),
    "our series": ChangedRelease(series, "fixed-elsewhere"),
    "fix by hand": ChangedRelease(in_class(BY_HAND), "fixed-elsewhere"),
    "fix in the base class": ChangedRelease(
        edit(BASE_WALK, BASE_WALK.replace("break", "continue")), "fixed-elsewhere"
    ),
    "fix under another name": ChangedRelease(
        lambda site: (
            in_class(BY_HAND.replace("_remove_blocks_in_range", "_retire"))(site),
            behind_class("MambaManager._remove_blocks_in_range = MambaManager._retire")(site),
        ),
        "fixed-elsewhere",
    ),
    "fix at module level": ChangedRelease(
        behind_class(f"{_MODULE_LEVEL}\n{_ASSIGN}"), "fixed-elsewhere"
    ),
    "fix as a mixin": ChangedRelease(
        in_front_of_class(_MIXIN, "", "class MambaManager(_Fix, SingleTypeKVCacheManager):"),
        "fixed-elsewhere",
    ),
    "fix as a decorator": ChangedRelease(
        in_front_of_class(_DECORATOR, "@fixed\n", "class MambaManager(SingleTypeKVCacheManager):"),
        "fixed-elsewhere",
    ),
    "fix as a subclass of that name": ChangedRelease(
        behind_class(f"class MambaManager(MambaManager):\n{BY_HAND}"), "fixed-elsewhere"
    ),
    "half: what nobody uses": ChangedRelease(lambda site: series(site, 0), "patched"),
    "half: no declaration": ChangedRelease(lambda site: series(site, 1), "drifted"),
    "half: no clean-up": ChangedRelease(in_class(WITHOUT_CLEAN_UP), "drifted"),
    "half: base class alone, no clean-up": ChangedRelease(
        in_base,
        "drifted",
    ),
    "half: no clean-up, at module level": ChangedRelease(
        behind_class(f"{as_function(WITHOUT_CLEAN_UP)}\n{_ASSIGN}"), "drifted"
    ),
    "a changed method": ChangedRelease(
        edit(LINE, LINE.replace("request_id", "str(request_id)")), "drifted"
    ),
    "a changed method, allowed": ChangedRelease(
        edit(LINE, LINE.replace("request_id", "str(request_id)")), "patched", allow_drift="true"
    ),
    "other arguments, allowed": ChangedRelease(
        in_class(
            "\n    def _remove_blocks_in_range("
            "self, request_id, first_block, last_block, why=''):\n"
            "        super()._remove_blocks_in_range(request_id, first_block, last_block)\n"
        ),
        "drifted",
        allow_drift="1",
    ),
    "native without its method": ChangedRelease(
        behind_class("del MambaManager._remove_blocks_in_range"), "drifted", NATIVE
    ),
    "latent with the callers of 0.26.0": ChangedRelease(hand_picked_basis, "drifted", LATENT),
}
