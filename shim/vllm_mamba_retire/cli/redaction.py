"""Removes from a text what a public report must not hold: secrets, paths, hosts and users."""

from __future__ import annotations

import contextlib
import getpass
import os
import re

# Words of this package's own that can also be the name of a host or a user.
_OWN_WORDS = {"vllm", "root", "python", "main", "worker", "engine", "ray"}
_PACKAGES = re.compile(r"/(?:site|dist)-packages(?:/|$)")
_HARMLESS_NAME = re.compile(r"[\w.+-]*\.py|python[\d.]*|vllm", re.ASCII)
_URL = re.compile(r"[\w+.-]+://\S+")
_PATH = re.compile(r"(?<![\w.<])(?:~|\.{0,2}/)[^\s:;,'\"()]*")
_PATTERNS = (
    (re.compile(r"[^\s@=]+@[^\s@]+"), "<address>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "<address>"),
    # Named as a secret, and not a number such as max_num_batched_tokens=8192.
    (
        re.compile(
            r"(?i)(\w*(?:api[_-]?key|secret|passw|token|auth|bearer)[\w-]*[\"']?\s*[=:]\s*"
            r"(?:bearer\s+)?)(?!\d+\b)\S+"
        ),
        r"\1<secret>",
    ),
    (
        re.compile(r"\b(?:hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox|AKIA|eyJ|nvapi-)[\w./+=-]+"),
        "<secret>",
    ),
    # Long and random, but for the hash of the manager file.
    (re.compile(r"(?<!sha256 )\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z0-9_-]{32,}"), "<secret>"),
)


def redact(text: str) -> str:
    """The text without secrets, without host and user names, and with paths cut short.

    Of a path there stays what follows ``site-packages``, or the name of a Python or Python file.
    """
    if (home := os.path.expanduser("~")) != "/":  # noqa: PTH111  # Path's raises without a home
        text = text.replace(home, "~")
    text = _PATH.sub(_shorten, _URL.sub("<url>", text))
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    for word in _own_names():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", "<name>", text)
    return text


def _shorten(path: re.Match[str]) -> str:
    whole = path[0]
    if (found := _PACKAGES.search(whole)) is not None:
        return f"...{whole[found.start() :]}"
    name = whole.rpartition("/")[2]
    return f".../{name}" if _HARMLESS_NAME.fullmatch(name) else "<path>"


def _own_names() -> set[str]:
    """Names of this host and of this user."""
    host = os.uname().nodename
    names = {host, host.partition(".")[0]}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    return {name for name in names if name and name.lower() not in _OWN_WORDS}
