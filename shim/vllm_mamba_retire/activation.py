"""From the operator's wish to a verdict: look, decide, patch, look again, say so.

The only module that acts on the imported vLLM. Nothing raises out of it, except where the operator
asked for that with ``MAMBA_RETIRE=require``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import replace
from types import ModuleType

from . import binding, records
from .evidence import sight
from .names import ALLOW_DRIFT_VARIABLE, MANAGER_MODULE, MODE_VARIABLE
from .probe import probe
from .record import Record
from .releases import Matrix, Row, Status, load_matrix
from .retirement import Counters
from .target import Target, find_target
from .verdict import Evidence, Mode, Outcome, Reason, Verdict, decide

# Below "vllm", so that vLLM's own handler and format apply.
_logger = logging.getLogger("vllm.mamba_retire")
_lock = threading.RLock()
_current: Record | None = None
_said: Verdict | None = None


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
            record = _look_and_act(wished_mode())
        except Exception as error:
            return give_up(error)
        return _settle(record)


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
    global _current, _said
    with _lock:
        manager_class = _manager_class(sys.modules.get(MANAGER_MODULE))
        removed = manager_class is not None and binding.uninstall(manager_class)
        _current = _said = None
        records.withdraw()
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
    on_disk = replace(sight(mode, target, matrix), loaded_from=module.__file__)
    if manager_class is None:
        return on_disk
    ours_installed = binding.installation(manager_class) is not None
    foreign = _foreign(matrix, target, module, manager_class)
    # A probe of our own patch would be counted as traffic, and was made when it was put in place.
    probed = foreign is not None if ours_installed else _may_leak(on_disk.row)
    return replace(
        on_disk,
        ours_installed=ours_installed,
        foreign=foreign,
        subclass=next(binding.overriding_subclasses(manager_class), None),
        outcome=probe(module, manager_class).outcome if probed else None,
        drift_allowed=os.environ.get(ALLOW_DRIFT_VARIABLE) == "1",
    )


def _may_leak(row: Row | None) -> bool:
    return row is None or row.status in (Status.LIVE, Status.NATIVE)


def _foreign(
    matrix: Matrix, target: Target | None, module: ModuleType, manager_class: type
) -> str | None:
    if target is None or target.source is None:
        # Code without its source does not name the file it was loaded from.
        return None
    relied_on = tuple(dict.fromkeys(name.split(".")[1] for name in matrix.methods))
    return binding.foreign_method(manager_class, relied_on, str(module.__file__))


def _patch(module: ModuleType, manager_class: type, promised: Verdict) -> Verdict:
    """Install, then believe only the probe."""
    done = binding.install(manager_class)
    after = probe(module, manager_class)
    if after.outcome is Outcome.RETIRES:
        done.counters.reset()  # what the probe did is not traffic
        return promised
    binding.uninstall(manager_class)
    return Verdict(
        Reason.FAILED,
        f"patched, the class did not behave ({after.detail}); the patch was taken off again, "
        "report this.",
    )


def _manager_class(module: ModuleType | None) -> type | None:
    found = getattr(module, "MambaManager", None)
    return binding.defining_class(found, MANAGER_MODULE) if isinstance(found, type) else None


def _counters(manager_class: type | None) -> Counters | None:
    present = binding.installation(manager_class) if manager_class else None
    return present.counters if present else None


def _settle(record: Record) -> Verdict:
    """Keep the record, log it if it is news, and stop the process if that was asked for."""
    global _current, _said
    level = logging.WARNING if record.verdict.in_doubt else logging.INFO
    # From 0.31 on the manager can be imported before vLLM sets up its logging; then the line waits
    # for the next call, which vLLM's plugin loader makes after that.
    if _said != record.verdict and _logger.isEnabledFor(level):
        _logger.log(level, record.line())
        _said = record.verdict
    _current = record
    records.keep(record)
    if record.verdict.in_doubt and os.environ.get(MODE_VARIABLE) == Mode.REQUIRE.value:
        raise RequireFailed(
            f"vllm-mamba-retire: MAMBA_RETIRE=require, but {record.verdict.sentence}"
        )
    return record.verdict
