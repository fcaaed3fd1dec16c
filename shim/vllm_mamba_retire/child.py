"""Runs a child process that imports vLLM and answers in JSON.

vLLM, the patch and the environment that both read are fixed for the life of a process, so each
request runs in a new process. The parent calls `ask`; a module that is run with ``python -m`` calls
`answer`. Messages are lines on the child's real stdout that begin with a mark; what vLLM prints to
stdout goes to stderr. A child ends when its parent does, however the parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_MARK = "\x1e"  # the record separator of JSON text sequences (RFC 7464)
_LINES_SHOWN = 20
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class ChildError(Exception):
    """The child returned no answer.

    The message is the child's own reason in one sentence, if it gave one, else it ends with the
    last lines that the child printed. `log` is the end of its output, with any traceback.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class RefusalError(Exception):
    """Raised in the child if it cannot answer; the message says why in one sentence."""


def ask(
    module: str,
    payload: Any = None,
    *,
    environment: Mapping[str, str | None] | None = None,
    path: Sequence[str | Path] = (),
    folder: Path | None = None,
    timeout: float | None = None,
    on_event: Callable[[Any], None] | None = None,
) -> Any:
    """Run ``python -m module`` with this interpreter and return its answer.

    Args:
        module: a module that calls `answer`.
        payload: JSON value passed to it.
        environment: variables to set, or to unset where the value is None.
        path: folders searched for vLLM before all others.
        folder: working folder of the child.
        timeout: seconds after which the child is killed.
        on_event: called with each value that the child reports before it answers.

    Raises:
        ChildError: the child refused, failed, printed no answer or took too long.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                env=_environment(environment or {}, path),
                cwd=folder,
            )
        except OSError as error:
            raise ChildError(f"{sys.executable}: {error.strerror}") from error
        expired = threading.Event()
        with child, _killed_after(child, timeout, expired):
            assert child.stdin is not None
            assert child.stdout is not None
            # The pipe stays open: its end tells the child that the parent is gone.
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(payload) + "\n")
                child.stdin.flush()
            for line in child.stdout:
                if not line.startswith(_MARK):
                    continue
                kind, value = json.loads(line[1:])
                if kind == "answer":
                    return value
                if kind == "refusal":
                    raise ChildError(value, _tail(log))
                if on_event is not None:
                    on_event(value)
        if expired.is_set():
            raise ChildError(f"{module}: no answer within {timeout:g} seconds")
        raise ChildError(f"{module} ended with status {child.returncode}:\n{_tail(log)}")


def answer(function: Callable[[Any, Callable[[Any], None]], Any]) -> NoReturn:
    """Answer the parent and end this process.

    Args:
        function: takes the payload and a function that reports JSON values before the answer;
            returns the answer, or raises `RefusalError`.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    payload = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        out.write(f"{_MARK}{json.dumps([kind, value])}\n")
        out.flush()

    status = 0
    try:
        send("answer", function(payload, lambda value: send("event", value)))
    except RefusalError as refusal:
        send("refusal", str(refusal))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        send("refusal", _unsupported(error))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    # Interpreter shutdown runs vLLM's exit handlers: seconds of work for nothing.
    os._exit(status)


def describe(error: Exception) -> str:
    """Type and message of an exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": .")


def _unsupported(error: Exception) -> str:
    """One sentence: the release, what of it is missing or failed and where, the newest known one.

    The child's code depends on names and signatures inside vLLM; what a release lacks of them
    shows as an exception.
    """
    from .releases import load_matrix
    from .target import find_target

    target = find_target()
    if target is None:
        return f"No vLLM is installed for {sys.executable}: {describe(error)}."
    version = target.version or "of an unknown version"
    newest = load_matrix().releases[-1].version
    return (
        f"This command cannot run on vLLM {version}: {describe(error)} ({_place(error)}). "
        f"The newest release known to work is {newest}. "
        "vLLM itself is unchanged; update vllm-mamba-retire, or report this."
    )


def _place(error: Exception) -> str:
    """Return the innermost line of this package's code in the exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    frame = next((f for f in reversed(frames) if f.filename.startswith(ours)), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def _environment(changes: Mapping[str, str | None], path: Sequence[str | Path]) -> dict[str, str]:
    changed = {**os.environ, **_QUIET, **changes}
    if path:
        ours = Path(__file__).parents[1]
        inherited = filter(None, [changed.get("PYTHONPATH")])
        changed["PYTHONPATH"] = os.pathsep.join([*map(str, (*path, ours)), *inherited])
    return {name: value for name, value in changed.items() if value is not None}


@contextlib.contextmanager
def _killed_after(
    child: subprocess.Popen[str], timeout: float | None, expired: threading.Event
) -> Iterator[None]:
    """Kill the child when time is up, and whenever the body ends."""

    def expire() -> None:
        expired.set()
        child.kill()

    timer = threading.Timer(timeout, expire) if timeout is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
        child.wait()
    finally:
        if timer is not None:
            timer.cancel()
        child.kill()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-_LINES_SHOWN:]).strip()
