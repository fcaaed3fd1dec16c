"""Patches a pinned vLLM with the upstream fix for Mamba state retirement (vllm#55450).

Importing this package arms the patch: vLLM's manager module is patched at once if it is imported,
else when it gets imported. The import itself loads neither vLLM nor torch.

An error of this package never breaks vLLM's import, and with ``MAMBA_RETIRE=require`` it always
stops the process, also where a caller catches `Exception` or imports a second time.
"""

from __future__ import annotations

import os
import sys

from ._version import __version__
from .names import MANAGER_MODULE, MODE_VARIABLE, read_mode

TYPE_CHECKING = False  # as in typing, which alone would take most of the time of this import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .records import Record
    from .verdict import Verdict

__all__ = ["__version__", "activate", "arm", "current", "deactivate"]


def arm() -> None:
    """Patch vLLM's manager now, or as soon as it is imported. Idempotent.

    Raises:
        SystemExit: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    if is_off():
        return
    try:
        if _mode() == "require" and "vllm" not in sys.modules:
            from .activation import require_target

            require_target()
        if MANAGER_MODULE in sys.modules:
            activate()
        else:
            _watch_imports().vllm_seen |= "vllm" in sys.modules
            if "vllm" in sys.modules:
                _hook_manager_import()
    except Exception as error:
        report(error)


def disarm() -> None:
    """Do not wait for the first import of vLLM any more; no effect once that import has begun."""
    for finder in _our_finders():
        finder.vllm_seen = True


def is_off() -> bool:
    """Whether ``MAMBA_RETIRE=off``."""
    return _mode() == "off"


def activate() -> Verdict | None:
    """Decide whether the imported vLLM needs the patch, and patch it if so.

    Returns:
        The verdict; None if vLLM's manager module is not imported yet.

    Raises:
        SystemExit: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    module = sys.modules.get(MANAGER_MODULE)
    if module is None:
        return None
    if _is_initializing(module):
        module = _wait_for_manager()
        if module is None:
            return None
    if _is_initializing(module):
        _activate_later()
        return None
    return _activate()


def deactivate() -> bool:
    """Remove the patch; vLLM's methods are the identical objects as before.

    Returns:
        Whether the class was patched.

    Raises:
        binding.BindingError: other code replaced our methods since; nothing is changed.
    """
    from . import activation

    return activation.deactivate()


def current() -> Record | None:
    """Return this process's record (verdict, counters); None before a verdict is reached."""
    from . import activation

    return activation.current()


class _VllmImports:
    """A finder that sets the post-import hook when vLLM is first imported, and enforces `require`.

    wrapt takes several times longer to import than this package; it is loaded together with vLLM,
    whose import takes seconds. The finder is never removed: an entry that leaves `sys.meta_path`
    during an import makes Python skip the entry after it.

    Attributes:
        vllm_seen: the import of vLLM has begun.
        problem: the message with which ``MAMBA_RETIRE=require`` stops this process. The hook runs
            once per module; a caller that catches that exit and imports again is stopped here.
    """

    def __init__(self) -> None:
        self.vllm_seen = False
        self.problem: object = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002
        if name == "vllm" and not self.vllm_seen:
            self.vllm_seen = True
            _hook_manager_import()
        elif name == MANAGER_MODULE and self.problem is not None and _mode() == "require":
            raise SystemExit(self.problem)


def _our_finders() -> list[Any]:
    # By name: a reloaded or second copy of this package finds the finder of the first.
    return [f for f in sys.meta_path if type(f).__qualname__ == _VllmImports.__qualname__]


def _watch_imports() -> Any:
    for finder in _our_finders():
        return finder
    sys.meta_path.insert(0, _VllmImports())
    return sys.meta_path[0]


def _hook_manager_import() -> None:
    hooked = False

    def run(_module: ModuleType) -> None:
        # wrapt calls at once if the module is in sys.modules, complete or not; else it calls
        # after the module's last line.
        _activate() if hooked else activate()

    try:
        import wrapt

        wrapt.register_post_import_hook(run, MANAGER_MODULE)
        hooked = True
    except Exception as error:
        report(error)


def _activate() -> Verdict | None:
    try:
        from . import activation

        return activation.activate()
    except SystemExit as refusal:
        _watch_imports().problem = refusal.code
        raise
    except Exception as error:
        report(error)
        return None


def _wait_for_manager() -> ModuleType | None:
    """Wait until another thread has imported the manager; None if that fails."""
    try:
        __import__(MANAGER_MODULE)
    except Exception:  # vLLM's own, and raised to whoever imports it
        return None
    return sys.modules.get(MANAGER_MODULE)


def _activate_later() -> None:
    """Start a thread that waits until this thread has imported the manager, then activates."""
    import threading

    def wait() -> None:
        if _wait_for_manager() is not None:
            _activate()

    threading.Thread(target=wait, name="mamba-retire-wait", daemon=True).start()


def _is_initializing(module: ModuleType) -> bool:
    # importlib's own flag: "in sys.modules" does not mean complete.
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _mode() -> str | None:
    return read_mode(os.environ.get(MODE_VARIABLE))


def report(error: Exception) -> None:
    """Handle an internal error: log it once and leave vLLM unpatched.

    Raises:
        SystemExit: ``MAMBA_RETIRE=require``.
    """
    sentence = f"{type(error).__name__}: {error}; vLLM is left as it is. Reinstall this package."
    try:
        from .activation import report_error
    except Exception:  # that is the broken part, and nothing can be recorded
        finder = _watch_imports()
        known = finder.problem is not None
        finder.problem = f"vllm-mamba-retire: MAMBA_RETIRE=require, but {sentence}"
        if _mode() == "require":
            raise SystemExit(finder.problem) from None
        if not known:
            import logging

            logger = logging.getLogger("vllm.mamba_retire")
            logger.warning("vllm-mamba-retire: failed: %s", sentence)
        return
    try:
        report_error(error)
    except SystemExit as refusal:
        _watch_imports().problem = refusal.code
        raise


arm()
