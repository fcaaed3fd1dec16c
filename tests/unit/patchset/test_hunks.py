"""Diffs are applied with no fuzz: in exactly one place, or not at all."""

from __future__ import annotations

import pytest

from vllm_mamba_retire.patchset import hunks

PATCH = """Description: whatever
---
--- a/f.py
+++ b/f.py
@@ -1,2 +1,3 @@
 one
+one and a half
 two
@@ -5,2 +6,2 @@
-five
+FIVE
 six
"""
BEFORE = "one\ntwo\nthree\nfour\nfive\nsix\n"
AFTER = "one\none and a half\ntwo\nthree\nfour\nFIVE\nsix\n"


def only(patch: str) -> hunks.FileDiff:
    (diff,) = hunks.parse(patch)
    return diff


def test_a_diff_is_applied_and_taken_out_again():
    assert hunks.apply(only(PATCH), BEFORE) == AFTER
    assert hunks.undo_present(only(PATCH), AFTER) == BEFORE


def test_a_hunk_is_found_where_lines_were_added_above():
    assert hunks.apply(only(PATCH), "zero\n" + BEFORE) == "zero\n" + AFTER


@pytest.mark.parametrize(
    "changed",
    [
        BEFORE.replace("two", "2"),  # another context line
        BEFORE.replace("one\n", "one \n"),  # white space counts
        BEFORE.replace("five", " five"),  # not from the start of a line
        AFTER,  # applied already
    ],
)
def test_a_hunk_that_does_not_fit_is_an_error(changed: str):
    with pytest.raises(hunks.HunkError, match=r"hunk \d of f.py fits in 0 places"):
        hunks.apply(only(PATCH), changed)


def test_a_hunk_that_fits_twice_is_an_error():
    with pytest.raises(hunks.HunkError, match=r"hunk 1 of f\.py fits in 2 places"):
        hunks.apply(only(PATCH), BEFORE + BEFORE)


def test_half_of_a_patch_is_taken_out_of_a_file_that_has_only_half():
    half = BEFORE.replace("five", "FIVE")
    assert hunks.undo_present(only(PATCH), half) == BEFORE


def test_carriage_returns_in_the_patch_do_not_reach_the_file():
    assert hunks.apply(only(PATCH.replace("\n", "\r\n")), BEFORE) == AFTER


def test_a_new_file_is_made_only_where_there_is_none():
    diff = only("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,2 @@\n+a\n+b\n")
    assert diff.creates
    assert hunks.apply(diff, None) == "a\nb\n"
    with pytest.raises(hunks.HunkError, match="exists already"):
        hunks.apply(diff, "a\n")


def test_a_missing_file_is_an_error():
    with pytest.raises(hunks.HunkError, match="does not exist"):
        hunks.apply(only(PATCH), None)


@pytest.mark.parametrize(
    "patch",
    [
        "no diff at all\n",
        "--- a/f\n+++ b/f\n@@ -1,9 +1,9 @@\n cut short\n",
        "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n",
    ],
)
def test_what_is_no_diff_of_ours_is_an_error(patch: str):
    with pytest.raises(hunks.HunkError):
        hunks.parse(patch)
