"""Installs the retirement on vLLM's `MambaManager` and removes it again.

The class object is changed in place and never rebound: platform plug-ins subclass it, and other
modules hold it by reference. What stood there before is kept on the class, so that removing the
patch restores the identical objects, and an attribute that was inherited is inherited again.

Everything that knows how the class of a live release is shaped is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final
from weakref import ref

from .retirement import Counters, Retirement

REMOVE_RANGE: Final = "_remove_blocks_in_range"
POP_BLOCKS: Final = "pop_blocks_for_free"
# The methods that are patched, with the parameters that they have in every live release.
_PARAMETERS: Final = {
    REMOVE_RANGE: ("self", "request_id", "first_block", "last_block"),
    POP_BLOCKS: ("self", "request_id"),
}
PATCHED_METHODS: Final = tuple(_PARAMETERS)
_MARK: Final = "__mamba_retire__"
_INHERITED: Final = "inherited"  # equal in every copy of this package
# On a manager: our state, and its watermarks under vLLM 0.30.0's name, which public tools read.
_STATE: Final = "_mamba_retirement"
_WATERMARKS: Final = "_num_retired_blocks"


class BindingError(Exception):
    """The class cannot take the patch, or no longer carries it on top."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What was done to one class: what stood there before, what stands there now.

    Attributes:
        before: method -> what the class held itself, or a mark that it inherited the method.
        after: method -> our function.
        counters: of all its managers.
        managers: those that carry our attributes.
    """

    before: dict[str, object]
    after: dict[str, Callable[..., Any]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    managers: list[ref[Any]] = field(default_factory=list)


def installation(manager_class: type) -> Installation | None:
    """The patch on this very class (not on a base of it), if any."""
    found = vars(manager_class).get(_MARK)
    # By name: another copy of this package may have installed it.
    return found if type(found).__qualname__ == Installation.__qualname__ else None


def is_ours(function: object) -> bool:
    """Whether a method was put in place by this package, in this or another copy of it."""
    # functools.wraps copies our mark onto a wrapper around our method.
    return type(function) is FunctionType and (
        _MARK in vars(function) and "__wrapped__" not in vars(function)
    )


def install(manager_class: type) -> Installation:
    """Install the retirement on `manager_class`; a second call changes nothing.

    Args:
        manager_class: vLLM's `MambaManager`, of a release with `_remove_blocks_in_range`
            (0.25.0 and later) and `pop_blocks_for_free` (0.24.0 and later).

    Returns:
        The record of what was changed.

    Raises:
        BindingError: the class lacks one of the two methods, or one takes other arguments.
    """
    if present := installation(manager_class):
        return present
    if (reason := obstacle(manager_class)) is not None:
        raise BindingError(reason)
    done = Installation(
        before={name: vars(manager_class).get(name, _INHERITED) for name in PATCHED_METHODS}
    )
    done.after[REMOVE_RANGE] = _remove_range(manager_class, done)
    done.after[POP_BLOCKS] = _pop_blocks(manager_class, done)
    # The clean-up goes first: a request that ends between the two leaves no watermark.
    for name in (POP_BLOCKS, REMOVE_RANGE):
        setattr(manager_class, name, done.after[name])
    setattr(manager_class, _MARK, done)
    return done


def obstacle(manager_class: type) -> str | None:
    """Why the class cannot take the patch: a method is missing, or takes other arguments."""
    for name, parameters in _PARAMETERS.items():
        function = _lookup(manager_class, name)
        if not callable(function):
            return f"{manager_class.__qualname__} has no {name}"
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            return f"{manager_class.__qualname__}.{name} takes ({', '.join(found)})"
    return None


def uninstall(manager_class: type) -> bool:
    """Remove the retirement from `manager_class` and its live managers.

    Returns:
        Whether it was installed.

    Raises:
        BindingError: somebody else replaced one of our methods since; nothing is changed.
    """
    present = installation(manager_class)
    if present is None:
        return False
    for name, ours in present.after.items():
        if vars(manager_class).get(name) is not ours:
            raise BindingError(
                f"{manager_class.__qualname__}.{name} was replaced after this patch by "
                f"{describe(_lookup(manager_class, name))}; remove that one first"
            )
    for name, before in present.before.items():
        if before == _INHERITED:
            delattr(manager_class, name)
        else:
            setattr(manager_class, name, before)
    delattr(manager_class, _MARK)
    for manager in filter(None, (found() for found in present.managers)):
        for name in (_STATE, _WATERMARKS):
            vars(manager).pop(name, None)
    return True


def defining_class(manager_class: type, module_name: str) -> type:
    """vLLM's own `MambaManager`, even if the module's name was rebound to a subclass of it."""
    own = [c for c in manager_class.__mro__ if c.__module__ == module_name]
    return next((c for c in own if c.__name__ == "MambaManager"), manager_class)


def foreign_method(manager_class: type, names: tuple[str, ...], module_file: str) -> str | None:
    """The first of the named methods that the module's own source did not define.

    Args:
        manager_class: class to look at, with its bases.
        names: methods that the patch depends on.
        module_file: path of the file that defines the class.

    Returns:
        ``"method (whose)"``, or None where every method comes from `module_file`.
    """
    for name in names:
        function = _lookup(manager_class, name)
        if function is not None and not is_ours(function) and _file_of(function) != module_file:
            return f"{name} ({describe(function)})"
    return None


def displaced_method(manager_class: type) -> str | None:
    """The first of the patched methods that is not ours any more, as ``"method (whose)"``.

    For a class that was patched: None where every method in force is ours.
    """
    for name in PATCHED_METHODS:
        function = _lookup(manager_class, name)
        if not is_ours(function):
            return f"{name} ({describe(function)})"
    return None


def overriding_subclasses(manager_class: type) -> Iterator[str]:
    """Subclasses that replace one of the patched methods, as ``"module.Class.method"``."""
    subclasses: list[type] = manager_class.__subclasses__()
    for subclass in subclasses:
        for name in PATCHED_METHODS:
            if name in vars(subclass):
                yield f"{subclass.__module__}.{subclass.__qualname__}.{name}"
        yield from overriding_subclasses(subclass)


def describe(function: object) -> str:
    """Whose method this is, as ``module.qualname``."""
    if type(function) is FunctionType and "__wrapped__" in vars(function):
        # functools.wraps copies __qualname__; take the name from the code object.
        return f"{function.__globals__.get('__name__')}.{function.__code__.co_name}"
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _lookup(manager_class: type, name: str) -> object | None:
    return next((vars(c)[name] for c in manager_class.__mro__ if name in vars(c)), None)


def _file_of(function: object) -> str | None:
    # functools.wraps copies the name; a wrapt proxy forwards even __code__.
    return function.__code__.co_filename if type(function) is FunctionType else None


def _state(manager: Any, installed: Installation) -> Retirement:
    """The manager's state, made on first use: the manager may be older than the patch."""
    try:
        found: Retirement = manager._mamba_retirement
    except AttributeError:
        found = Retirement(manager._null_block, installed.counters)
        installed.managers.append(ref(manager))
        setattr(manager, _STATE, found)
        setattr(manager, _WATERMARKS, found.watermarks)
    return found


def exempt(manager: Any) -> None:
    """Keep what is done with this manager out of the counters: a probe is no traffic."""
    setattr(manager, _STATE, Retirement(manager._null_block, Counters()))


def _remove_range(manager_class: type, installed: Installation) -> Callable[..., None]:
    def _remove_blocks_in_range(
        self: Any, request_id: str, first_block: int, last_block: int
    ) -> None:
        if self.mamba_cache_mode != "align":
            parent: Any = super(manager_class, self)
            parent._remove_blocks_in_range(request_id, first_block, last_block)
            return
        table = self.req_to_blocks.get(request_id)
        if table is None:
            return
        _state(self, installed).retire(
            request_id,
            table,
            first_block,
            last_block,
            self.block_pool,
            stock_frees=self.last_state_block_idx.get(request_id),
        )

    return _signed(_remove_blocks_in_range, manager_class)


def _pop_blocks(manager_class: type, installed: Installation) -> Callable[..., Any]:
    own = vars(manager_class).get(POP_BLOCKS)

    def pop_blocks_for_free(self: Any, request_id: str) -> Any:
        _state(self, installed).forget(request_id)
        if own is not None:
            return own(self, request_id)
        parent: Any = super(manager_class, self)
        return parent.pop_blocks_for_free(request_id)

    return _signed(pop_blocks_for_free, manager_class)


def _signed(function: Callable[..., Any], manager_class: type) -> Callable[..., Any]:
    function.__qualname__ = f"{manager_class.__qualname__}.{function.__name__}"
    setattr(function, _MARK, True)
    return function
