"""Activates the patch: inspect, decide, patch, probe again, log the verdict.

The only module that acts on the imported vLLM. Nothing raises out of it, except with
``MAMBA_RETIRE=require``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import replace
from types import ModuleType

from . import binding, keep_binding, records
from .evidence import Evidence, Outcome, collect_evidence
from .keep import KeepCounters
from .keep_probe import KeepOutcome, probe_keep
from .keep_verdict import KeepState, KeepVerdict, decide_keep, unavailable
from .names import (
    ALLOW_DRIFT_VARIABLE,
    KEEP_VARIABLE,
    MANAGER_MODULE,
    MODE_VARIABLE,
    is_true,
    read_keep,
    read_mode,
)
from .probe import probe
from .records import Record
from .releases import Matrix, Row, Status, load_matrix
from .retirement import Counters
from .target import Target, find_target
from .verdict import Reason, Verdict, decide

# Below "vllm", so that vLLM's own handler and format apply.
_logger = logging.getLogger("vllm.mamba_retire")
_lock = threading.RLock()
_current: Record | None = None
_logged: str | None = None
_displaced: str | None = None  # what `recheck` found last


class RequireFailed(SystemExit):
    """``MAMBA_RETIRE=require`` and vLLM may leak here: the process exits with one sentence.

    A `SystemExit`, because vLLM and its launchers catch `Exception` around plug-ins.
    """


def activate() -> Verdict:
    """Decide whether the vLLM of this process needs the patch, and patch it if so.

    Idempotent and thread-safe. vLLM's manager module must be imported already.

    Returns:
        The verdict, reached again by a probe after patching.

    Raises:
        RequireFailed: ``MAMBA_RETIRE=require`` and the verdict is in doubt.
    """
    with _lock:
        try:
            record = _inspect_and_patch()
        except Exception as error:
            return report_error(error)
        return _conclude(record)


def report_error(error: Exception) -> Verdict:
    """Log an internal error once and leave vLLM unpatched.

    Raises:
        RequireFailed: ``MAMBA_RETIRE=require``.
    """
    sentence = f"{type(error).__name__}: {error}; vLLM is left as it is. Report this."
    return _conclude(Record.of(Verdict(Reason.FAILED, sentence), None))


def require_target() -> None:
    """Stop the process if there is no vLLM to patch.

    Raises:
        RequireFailed: no vLLM can be imported here.
    """
    if (target := find_target()) is None:
        _conclude(Record.of(decide(Evidence(target)), target))


def deactivate() -> bool:
    """Remove the patch; vLLM's methods are the identical objects as before.

    Returns:
        Whether the class was patched.

    Raises:
        binding.BindingError: other code replaced our methods since; nothing is changed.
    """
    global _current, _logged, _displaced
    with _lock:
        manager_class = _manager_class(sys.modules.get(MANAGER_MODULE))
        removed = False
        if manager_class is not None:
            for patch in (*keep_binding.PATCHES, binding.RETIREMENT):
                removed |= binding.uninstall(manager_class, patch)
        _current = _logged = _displaced = None
        records.withdraw()
    return removed


def current() -> Record | None:
    """Return this process's record; None before a verdict is reached."""
    return _current


def recheck(record: Record) -> Record:
    """Check again whether our methods are the ones in force, in the class and its subclasses.

    Cheap while nothing has changed: for a thread that runs every few seconds, off the hot path. A
    change is logged once and never stops the process.

    Args:
        record: the last decision about this process.

    Returns:
        The current record; the same object if nothing changed.
    """
    global _displaced
    module = sys.modules.get(MANAGER_MODULE)
    manager_class = _manager_class(module)
    if record.counters is None or module is None or manager_class is None:
        return record  # nothing of ours is on a class
    displaced = _displacement(manager_class)
    if displaced == _displaced:
        return record
    with _lock:
        _displaced = displaced
        if binding.installation(manager_class) is None:
            verdict = Verdict(
                Reason.CONFLICT,
                "vLLM's manager module was loaded again after it was patched, and its new class "
                "may leak; restart this process.",
            )
        else:
            verdict = decide(inspect_process(find_target(), module))
        return _publish(record.replaced(verdict))


def _displacement(manager_class: type) -> str | None:
    if binding.installation(manager_class) is None:
        return "not patched"
    subclass = next(binding.overriding_subclasses(manager_class), None)
    return binding.displaced_method(manager_class) or subclass


def inspect_process(target: Target | None, module: ModuleType) -> Evidence:
    """Collect the evidence about the imported manager module; run the probe if it may leak.

    Args:
        target: the vLLM on disk.
        module: vLLM's manager module, completely imported.

    Returns:
        The evidence from files, and from the class as it is in this process.
    """
    matrix = load_matrix()
    on_disk = replace(collect_evidence(target, matrix), loaded_from=module.__file__)
    manager_class = _manager_class(module)
    if manager_class is None:
        return on_disk
    ours_installed = binding.installation(manager_class) is not None
    foreign = binding.displaced_method(manager_class) if ours_installed else None
    foreign = foreign or _foreign(matrix, target, module, manager_class)
    probed = foreign is not None if ours_installed else _may_leak(on_disk.row)
    return replace(
        on_disk,
        ours_installed=ours_installed,
        foreign=foreign,
        subclass=next(binding.overriding_subclasses(manager_class), None),
        outcome=_probe(module, manager_class) if probed else None,
        obstacle=binding.obstacle(manager_class),
        drift_allowed=is_true(os.environ.get(ALLOW_DRIFT_VARIABLE)),
    )


def _inspect_and_patch() -> Record:
    mode = os.environ.get(MODE_VARIABLE)
    target = find_target()
    if read_mode(mode) is None:
        sentence = f"{MODE_VARIABLE}={mode} is not auto, require or off; vLLM is left as it is."
        return Record.of(Verdict(Reason.FAILED, sentence), target)
    if read_mode(mode) == "off":
        return Record.of(decide(Evidence(target, off=True)), target)
    module = sys.modules[MANAGER_MODULE]
    manager_class = _manager_class(module)
    before = inspect_process(target, module)
    verdict = decide(before)
    if verdict.reason is Reason.PATCHED and manager_class and not before.ours_installed:
        verdict = _patch(module, manager_class, verdict)
    keep = _keep(module, manager_class, before, verdict)
    counters, kept = _counters(manager_class), _keep_counters(manager_class)
    return Record.of(verdict, target, counters, keep=keep, keep_counters=kept)


def _probe(module: ModuleType, manager_class: type) -> Outcome:
    """Probe the class that vLLM instantiates, if it is another one, then vLLM's own class."""
    serving = getattr(module, "MambaManager", manager_class)
    if serving is not manager_class and probe(module, serving).outcome is Outcome.RETIRES:
        return Outcome.RETIRES
    return probe(module, manager_class).outcome


def _may_leak(row: Row | None) -> bool:
    return row is None or row.status in (Status.LIVE, Status.NATIVE)


def _foreign(
    matrix: Matrix, target: Target | None, module: ModuleType, manager_class: type
) -> str | None:
    if target is None or target.source is None:
        # Code without its source does not name the file it was loaded from.
        return None
    fingerprinted = tuple(dict.fromkeys(name.split(".")[1] for name in matrix.methods))
    return binding.foreign_method(manager_class, fingerprinted, str(module.__file__))


def _patch(module: ModuleType, manager_class: type, promised: Verdict) -> Verdict:
    """Install, and report success only if the probe observes it."""
    binding.install(manager_class)
    after = probe(module, manager_class)
    if after.outcome is Outcome.RETIRES:
        return promised
    binding.uninstall(manager_class)
    return Verdict(
        Reason.FAILED,
        f"the patched class failed the probe ({after.detail}); vLLM's methods are restored. Report "
        "this.",
    )


def _keep(
    module: ModuleType, manager_class: type | None, seen: Evidence, verdict: Verdict
) -> KeepVerdict:
    """Decide whether to keep the newest states, and install that patch if so.

    Keeping is an optimisation: a failure here does not affect retirement, and
    ``MAMBA_RETIRE=require`` does not stop the process.
    """
    asked = os.environ.get(KEEP_VARIABLE)
    try:
        rule = read_keep(asked)
        patch = keep_binding.PATCHES[rule == "prompt"]
        overridden = binding.overriding_subclasses(manager_class, patch) if manager_class else ()
        decided = decide_keep(rule, asked, verdict, seen, next(iter(overridden), None))
        if decided.state is not KeepState.ON or manager_class is None:
            return decided
        if binding.installation(manager_class, patch):
            return decided
        return _install_keep(module, manager_class, patch, decided)
    except Exception as error:
        return unavailable(f"{type(error).__name__}: {error}")


def _install_keep(
    module: ModuleType, manager_class: type, patch: binding.Patch, promised: KeepVerdict
) -> KeepVerdict:
    outcome, detail = probe_keep(module, manager_class)
    if outcome is not KeepOutcome.PLAIN:
        return unavailable(f"before the patch, the class behaves differently ({detail})")
    done = binding.install(manager_class, patch)
    outcome, detail = probe_keep(module, manager_class)
    if outcome is not KeepOutcome.KEEPS:
        binding.uninstall(manager_class, patch)
        return unavailable(f"after the patch, the class does not keep the state ({detail})")
    done.counters.reset()
    return promised


def _manager_class(module: ModuleType | None) -> type | None:
    found = getattr(module, "MambaManager", None)
    return binding.defining_class(found, MANAGER_MODULE) if isinstance(found, type) else None


def _counters(manager_class: type | None) -> Counters | None:
    present = binding.installation(manager_class) if manager_class else None
    return present.counters if present else None


def _keep_counters(manager_class: type | None) -> KeepCounters | None:
    found = [binding.installation(manager_class, p) for p in keep_binding.PATCHES if manager_class]
    return next((present.counters for present in found if present), None)


def _conclude(record: Record) -> Verdict:
    """Publish the record, and stop the process if that is required."""
    _publish(record)
    verdict = record.verdict
    assert verdict is not None
    if verdict.in_doubt and read_mode(os.environ.get(MODE_VARIABLE)) == "require":
        raise RequireFailed(f"vllm-mamba-retire: MAMBA_RETIRE=require, but {verdict.sentence}")
    return verdict


def _publish(record: Record) -> Record:
    """Write the record, and log its verdict if that is new."""
    global _current, _logged
    # From 0.31 on the manager can be imported before vLLM sets up its logging; then the line waits
    # for the next call, which vLLM's plug-in loader makes after that.
    if _logged != record.line() and _logger.isEnabledFor(record.level):
        _logger.log(record.level, record.line())
        _logged = record.line()
    _current = record
    records.keep(record, recheck)
    return record
