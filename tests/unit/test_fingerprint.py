"""Fingerprints: equal on every Python, blind to layout, and to nothing that changes behaviour.

The pinned values were computed once, on Python 3.11; this file runs on 3.10-3.14.
"""

from __future__ import annotations

import pytest

from vllm_mamba_retire.fingerprint import fingerprints, method_names

SOURCE = '''\
import functools

LIMIT = 3


class Base:
    """Not a method."""

    @functools.wraps(print)
    @property
    def decorated(self):
        """A docstring
        of two lines."""
        return self.value

    def strings(self, name: str, width: int = 8) -> str:
        text = f"{name!r:>{width}} of {self.values['a']} {{literal}}"
        more = f"""first {name}
        second {self.total + 1:,}
        """
        raw = rf"\\d{{2}}{name}" "joined"
        return f'{f"{text}"}' + more + raw

    def walrus(self, items):
        if (count := len(items)) > LIMIT and not (first := items[0]).ready:
            return [item for item in self.stream() if (seen := item)]  # a remark
        return lambda *a, key=count, **k: (yield first)

    def empty(self): ...


class Child(Base):
    def wrapped(
        self,
        request_id: str,
        *,
        blocks: "list[int] | None" = None,
    ) -> None:
        self.blocks = (
            [block for block in blocks or () if block >= 0x1F]
            + self.rest[-1:]
            + [1_000 if self.ready else 1e-3]
        )

        match request_id:
            case "a" | "b":
                del self.blocks[0]
            case _:
                pass

    if LIMIT:

        def hidden(self):
            return 1
'''
PINNED = {
    "Base.decorated": "f253be5e4e143aa7",
    "Base.strings": "90256e69d53ec3cb",
    "Base.walrus": "98db5aca2197d246",
    "Base.empty": "704ab0ff06dceeca",
    "Child.wrapped": "b5c55768255056e4",
}
NAMES = (*PINNED, "Base.missing", "Missing.strings", "Child.hidden")


def test_fingerprints_are_the_same_on_every_python() -> None:
    assert fingerprints(SOURCE, NAMES) == PINNED


def test_what_a_class_defines_itself() -> None:
    assert method_names(SOURCE, "Base") == {"decorated", "strings", "walrus", "empty"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return self.value", "return self.value  # said somebody"),
        ("    A docstring\n".strip(), "Another docstring"),
        ('        """A docstring\n        of two lines."""\n', ""),
        ("+ more + raw", "+ more \\\n                + raw"),
        ("        match request_id:", "\n\n        # A remark.\n        match request_id:"),
        ("case _:\n                pass", "case _:\n                    pass"),
        ("(first := items[0]).ready:", "(\n            first := items[0]\n        ).ready:"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("\n    def empty", "\n    def another(self): ...\n\n    def empty"),
    ],
)
def test_layout_and_what_stands_elsewhere_do_not_count(before: str, after: str) -> None:
    changed = SOURCE.replace(before, after)
    assert changed != SOURCE
    assert fingerprints(changed, NAMES) == PINNED


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        ("Base.decorated", "    @property\n", ""),
        ("Base.decorated", "return self.value", "return self.values"),
        ("Base.strings", "{name!r:>{width}}", "{name!s:>{width}}"),
        ("Base.strings", "second {self.total + 1:,}", "second {self.total + 2:,}"),
        ("Base.strings", "width: int = 8", "width: int = 9"),
        ("Base.strings", '"joined"', "'joined'"),
        ("Base.walrus", "> LIMIT and not", "> LIMIT or not"),
        ("Base.empty", "def empty(self): ...", "def empty(self, x): ..."),
        ("Child.wrapped", "block >= 0x1F", "block > 0x1F"),
        ("Child.wrapped", "                del self.blocks[0]", "                self.blocks[0]"),
    ],
)
def test_what_changes_behaviour_counts_for_that_method_alone(
    method: str, before: str, after: str
) -> None:
    assert before in SOURCE
    found = fingerprints(SOURCE.replace(before, after), NAMES)
    assert found.pop(method) != PINNED[method]
    assert found == {name: value for name, value in PINNED.items() if name != method}


def test_a_statement_that_moves_into_another_block_counts() -> None:
    before = "                pass\n\n    if"
    after = "                pass\n        self.blocks = []\n\n    if"
    inside = "                pass\n                self.blocks = []\n\n    if"
    one, other = (fingerprints(SOURCE.replace(before, text), NAMES) for text in (after, inside))
    assert one["Child.wrapped"] != other["Child.wrapped"]


@pytest.mark.parametrize("indent", ["  ", "\t", " \t"])
def test_the_width_of_the_indentation_does_not_count(indent: str) -> None:
    """Text between triple quotes is no indentation: it stays, and it counts."""
    quoted = SOURCE[SOURCE.index("first {name}") : SOURCE.index("raw = ")]
    changed = "".join(
        line if line in quoted else line.replace("    ", indent)
        for line in SOURCE.splitlines(keepends=True)
    )
    assert fingerprints(changed, NAMES) == PINNED
    moved = SOURCE.replace("        second {self", "    second {self")
    assert fingerprints(moved, NAMES)["Base.strings"] != PINNED["Base.strings"]


def test_windows_line_ends_do_not_count() -> None:
    assert fingerprints(SOURCE.replace("\n", "\r\n"), NAMES) == PINNED


def test_a_source_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(SyntaxError):
        fingerprints("class (", NAMES)
