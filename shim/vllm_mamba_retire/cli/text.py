"""Makes text from outside safe to print on a terminal."""

from __future__ import annotations


def safe(text: object) -> str:
    """`text` with every control character but the line feed and the tab shown as an escape.

    Values from images, records, logs and file names can hold terminal escape codes, or line feeds
    that imitate output; callers that print one line pass the result through ``splitlines``.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in str(text)
    )
