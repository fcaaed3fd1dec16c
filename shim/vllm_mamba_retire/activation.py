"""From the operator's wish to a verdict: look, decide, patch, look again, say so.

The only module that acts on the imported vLLM. Nothing raises out of it, except where the operator
asked for that with ``MAMBA_RETIRE=require``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import ModuleType

from . import binding
from .fingerprint import fingerprints
from .matrix import Matrix, Row, Status, load_matrix
from .probe import probe
from .record import Record
from .retirement import Counters
from .target import MANAGER_MODULE, Target, find_target
from .verdict import Evidence, Mode, Outcome, Reason, Verdict, decide

MODE_VARIABLE = "MAMBA_RETIRE"
ALLOW_DRIFT_VARIABLE = "MAMBA_RETIRE_ALLOW_DRIFT"

# Below "vllm", so that vLLM's own handler and format apply.
_logger = logging.getLogger("vllm.mamba_retire")
_lock = threading.RLock()
_current: Record | None = None


class RequireFailed(SystemExit):
    """``MAMBA_RETIRE=require`` and vLLM may leak here: the process stops with one sentence.

    A `SystemExit`, because vLLM and its launchers catch `Exception` around plug-ins.
    """


def activate() -> Verdict:
    """Decide about the vLLM of this process and patch it where that is right.

    Idempotent and thread-safe. vLLM's manager module must be imported already.

    Raises:
        RequireFailed: ``MAMBA_RETIRE=require`` and the verdict leaves a doubt.
    """
    with _lock:
        try:
            return _settle(_look_and_act(wished_mode()))
        except Exception as error:
            return give_up(error)


def give_up(error: Exception) -> Verdict:
    """Our own code failed: vLLM runs on as it is, and that is said once.

    Raises:
        RequireFailed: ``MAMBA_RETIRE=require``.
    """
    sentence = f"{type(error).__name__}: {error}; vLLM is left as it is."
    return _settle(Record(Verdict(Reason.FAILED, sentence), None))


def wished_mode() -> Mode:
    """What ``MAMBA_RETIRE`` asks for.

    Raises:
        ValueError: it is none of auto, require, off.
    """
    wish = os.environ.get(MODE_VARIABLE, Mode.AUTO.value)
    if wish not in [mode.value for mode in Mode]:
        raise ValueError(f"{MODE_VARIABLE}={wish} is none of auto, require, off")
    return Mode(wish)


def require_target() -> None:
    """Stop the process if there is no vLLM to patch.

    Raises:
        RequireFailed: no vLLM can be imported here.
    """
    if (target := find_target()) is None:
        _settle(Record(decide(Evidence(Mode.REQUIRE, target)), target))


def deactivate() -> bool:
    """Take the patch off again; vLLM's methods are the identical objects as before.

    Returns:
        Whether there was a patch to take off.

    Raises:
        binding.BindingError: somebody else has replaced our methods since; nothing is changed.
    """
    global _current
    with _lock:
        manager_class = _manager_class(sys.modules.get(MANAGER_MODULE))
        removed = manager_class is not None and binding.uninstall(manager_class)
        _current = None
    return removed


def current() -> Record | None:
    """This process's record; None before a decision was made."""
    return _current


def _look_and_act(mode: Mode) -> Record:
    module = sys.modules[MANAGER_MODULE]
    target = find_target()
    manager_class = _manager_class(module)
    before = _look(mode, target, module, manager_class)
    verdict = decide(before)
    if verdict.reason is Reason.PATCHED and manager_class and not before.ours_installed:
        verdict = _patch(module, manager_class, verdict)
    return Record(verdict, target, _counters(manager_class))


def _look(
    mode: Mode, target: Target | None, module: ModuleType, manager_class: type | None
) -> Evidence:
    matrix = load_matrix()
    row: Row | None = None
    changed: tuple[str, ...] = ()
    if target is not None and target.source is not None:
        row, changed = compare(matrix, target)
    if manager_class is None:
        return Evidence(mode, target, module.__file__, row=row, changed=changed)
    probed = row is None or row.status in (Status.LIVE, Status.NATIVE)
    foreign = _foreign(matrix, target, module, manager_class)
    return Evidence(
        mode,
        target,
        loaded_from=module.__file__,
        ours_installed=binding.installation(manager_class) is not None,
        foreign=foreign,
        row=row,
        changed=changed,
        outcome=probe(module, manager_class).outcome if probed and not foreign else None,
        drift_allowed=os.environ.get(ALLOW_DRIFT_VARIABLE) == "1",
    )


def _foreign(
    matrix: Matrix, target: Target | None, module: ModuleType, manager_class: type
) -> str | None:
    if target is None or target.source is None:
        # Code without its source does not name the file it was loaded from.
        return None
    relied_on = tuple(dict.fromkeys(name.split(".")[1] for name in matrix.methods))
    return binding.foreign_method(manager_class, relied_on, str(module.__file__)) or next(
        binding.overriding_subclasses(manager_class), None
    )


def compare(matrix: Matrix, target: Target) -> tuple[Row | None, tuple[str, ...]]:
    """Hold a vLLM's source against the table.

    Returns:
        The row that has the same methods, if any, and else the methods that differ from the row
        of its version.
    """
    own = matrix.row_for(target.version)
    if own is not None and own.manager_sha256 == target.sha256:
        return own, ()
    found = fingerprints(target.source or "", matrix.methods)
    row = matrix.row_like(found, target.version)
    if row is not None or own is None:
        return row, ()
    names = (name for name in matrix.methods if found.get(name) != own.fingerprints.get(name))
    return None, tuple(names)


def _patch(module: ModuleType, manager_class: type, promised: Verdict) -> Verdict:
    """Install, then believe only the probe."""
    done = binding.install(manager_class)
    after = probe(module, manager_class)
    if after.outcome is Outcome.RETIRES:
        _reset(done.counters)
        return promised
    binding.uninstall(manager_class)
    return Verdict(
        Reason.FAILED,
        f"patched, the class did not behave ({after.detail}); the patch was taken off again, "
        "report this.",
    )


def _reset(counters: Counters) -> None:
    """Start from zero: what the probe did is not traffic."""
    counters.calls = counters.states_freed = 0
    counters.states_stock_would_keep = counters.ranges_clamped = 0


def _manager_class(module: ModuleType | None) -> type | None:
    found = getattr(module, "MambaManager", None)
    return binding.defining_class(found, MANAGER_MODULE) if isinstance(found, type) else None


def _counters(manager_class: type | None) -> Counters | None:
    present = binding.installation(manager_class) if manager_class else None
    return present.counters if present else None


def _settle(record: Record) -> Verdict:
    """Keep the record, log it if it is news, and stop the process if that was asked for."""
    global _current
    if _current is None or _current.verdict != record.verdict:
        level = logging.WARNING if record.verdict.in_doubt else logging.INFO
        _logger.log(level, record.line())
    _current = record
    if record.verdict.in_doubt and os.environ.get(MODE_VARIABLE) == Mode.REQUIRE.value:
        raise RequireFailed(
            f"vllm-mamba-retire: MAMBA_RETIRE=require, but {record.verdict.sentence}"
        )
    return record.verdict
