"""Makes text from outside safe to print on a terminal."""

from __future__ import annotations


def safe(text: object) -> str:
    """`text` with every control character but the line feed and the tab shown as an escape.

    Values from images, records, logs and file names can hold terminal escape codes.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def one_line(text: object) -> str:
    """`text` made safe and on one line: a line feed in a value could imitate output."""
    return " ".join(safe(text).split("\n"))
