"""Installs patches on vLLM's `MambaManager` and removes them again; defines the retirement patch.

The class object is changed in place and never rebound: platform plug-ins subclass it, and other
modules hold it by reference. The previous attributes are kept on the class, so that removing the
patch restores the identical objects, and an inherited attribute is inherited again. Several patches
may be installed, in any order; each can be removed alone.

This is the only module that depends on the methods and attributes of a live release's class.
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
_MARK: Final = "__mamba_retire__"
_INHERITED: Final = "inherited"  # equal in every copy of this package
# On a manager: our state, and its watermarks under vLLM 0.30.0's name, which public tools read.
_STATE: Final = "_mamba_retirement"
_WATERMARKS: Final = "_num_retired_blocks"


class BindingError(Exception):
    """The class lacks what the patch needs, or other code replaced a patched method."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Methods that are installed and removed together.

    Attributes:
        name: unique among patches.
        parameters: method -> its parameters in every release that the patch supports.
        methods: method -> function that takes the class and the installation and returns the new
            method, in the order of installation.
        counters: creates the counters of an installation.
        attributes: attributes that the new methods set on a manager.
    """

    name: str
    parameters: dict[str, tuple[str, ...]]
    methods: dict[str, Callable[[type, Installation], Callable[..., Any]]]
    counters: Callable[[], Any]
    attributes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Installation:
    """One patch on one class.

    Attributes:
        patch: the patch.
        counters: shared by all managers of the class.
        before: method -> the class's own attribute, or a mark that it inherited the method.
        after: method -> our function.
        managers: managers that have our attributes.
    """

    patch: Patch
    counters: Any
    before: dict[str, object] = field(default_factory=dict)
    after: dict[str, Callable[..., Any]] = field(default_factory=dict)
    managers: list[ref[Any]] = field(default_factory=list)


def installations(manager_class: type) -> tuple[Installation, ...]:
    """Return the patches on this class (not on its bases), in the order of installation."""
    found = vars(manager_class).get(_MARK)
    # By name: another copy of this package may have installed it.
    ours = (type(done).__qualname__ == Installation.__qualname__ for done in found or ())
    return found if isinstance(found, tuple) and all(ours) else ()


def installation(manager_class: type, patch: Patch | None = None) -> Installation | None:
    """Return the installation of a patch on this class (not on its bases), or None."""
    wanted = (patch or RETIREMENT).name
    return next((done for done in installations(manager_class) if done.patch.name == wanted), None)


def is_ours(function: object) -> bool:
    """Whether a method was installed by this package, by this copy of it or another one."""
    # functools.wraps copies our mark onto a wrapper around our method.
    return type(function) is FunctionType and (
        _MARK in vars(function) and "__wrapped__" not in vars(function)
    )


def install(manager_class: type, patch: Patch | None = None) -> Installation:
    """Install a patch on `manager_class`; a second call changes nothing.

    Args:
        manager_class: vLLM's `MambaManager`, of a release with `_remove_blocks_in_range`
            (0.25.0 and later) and `pop_blocks_for_free` (0.24.0 and later).
        patch: what to install; by default the retirement.

    Returns:
        The installation, with its counters.

    Raises:
        BindingError: the class lacks one of the methods, or one takes other arguments.
    """
    patch = patch or RETIREMENT
    if present := installation(manager_class, patch):
        return present
    if (reason := obstacle(manager_class, patch)) is not None:
        raise BindingError(reason)
    done = Installation(patch, patch.counters())
    _put_on(manager_class, done)
    setattr(manager_class, _MARK, (*installations(manager_class), done))
    return done


def obstacle(manager_class: type, patch: Patch | None = None) -> str | None:
    """Return why a patch does not fit the class (a method or parameter differs), or None."""
    for name, parameters in (patch or RETIREMENT).parameters.items():
        function = _lookup(manager_class, name)
        if not callable(function):
            return f"{manager_class.__qualname__} has no {name}"
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            return f"{manager_class.__qualname__}.{name} takes ({', '.join(found)})"
    return None


def uninstall(manager_class: type, patch: Patch | None = None) -> bool:
    """Remove a patch from `manager_class` and its live managers; other patches stay.

    Returns:
        Whether it was installed.

    Raises:
        BindingError: other code replaced one of our methods since; nothing is changed.
    """
    present = installation(manager_class, patch)
    if present is None:
        return False
    stack = installations(manager_class)
    for name, ours in {name: own for done in stack for name, own in done.after.items()}.items():
        if vars(manager_class).get(name) is not ours:
            raise BindingError(
                f"{manager_class.__qualname__}.{name} was replaced after this patch by "
                f"{describe(_lookup(manager_class, name))}; remove that one first"
            )
    above = stack[stack.index(present) + 1 :]
    for done in (*reversed(above), present):
        _take_off(manager_class, done)
    for done in above:
        _put_on(manager_class, done)
    if rest := tuple(done for done in stack if done is not present):
        setattr(manager_class, _MARK, rest)
    else:
        delattr(manager_class, _MARK)
    for manager in filter(None, (found() for found in present.managers)):
        for name in present.patch.attributes:
            vars(manager).pop(name, None)
    return True


def _put_on(manager_class: type, done: Installation) -> None:
    for name, make in done.patch.methods.items():
        done.before[name] = vars(manager_class).get(name, _INHERITED)
        ours = make(manager_class, done)
        ours.__qualname__ = f"{manager_class.__qualname__}.{ours.__name__}"
        setattr(ours, _MARK, True)
        done.after[name] = ours
        setattr(manager_class, name, ours)


def _take_off(manager_class: type, done: Installation) -> None:
    for name, before in done.before.items():
        if before == _INHERITED:
            delattr(manager_class, name)
        else:
            setattr(manager_class, name, before)


def replaced(manager_class: type, done: Installation, name: str) -> Callable[..., Any]:
    """Return the method that ours replaces: the class's own, or the one it inherited."""
    own = done.before[name]
    if callable(own):
        return own

    def inherited(self: Any, *args: Any) -> Any:
        return getattr(super(manager_class, self), name)(*args)

    return inherited


def defining_class(manager_class: type, module_name: str) -> type:
    """Return vLLM's own `MambaManager`, even if the module's name is rebound to a subclass."""
    own = [c for c in manager_class.__mro__ if c.__module__ == module_name]
    return next((c for c in own if c.__name__ == "MambaManager"), manager_class)


def foreign_method(manager_class: type, names: tuple[str, ...], module_file: str) -> str | None:
    """Find the first of the named methods that other code than vLLM's module defines.

    Args:
        manager_class: the class; its bases are searched too.
        names: methods that the patch depends on.
        module_file: path of the file that defines the class.

    Returns:
        ``"method (module.qualname of the other code)"``; None if all come from `module_file`.
    """
    for name in names:
        function = _lookup(manager_class, name)
        if function is not None and not is_ours(function) and _file_of(function) != module_file:
            return f"{name} ({describe(function)})"
    return None


def displaced_method(manager_class: type) -> str | None:
    """Find the first patched method that other code replaced, as ``"method (its owner)"``.

    For a patched class; None if every method in force is ours.
    """
    for name in RETIREMENT.methods:
        function = _lookup(manager_class, name)
        if not is_ours(function):
            return f"{name} ({describe(function)})"
    return None


def overriding_subclasses(manager_class: type, patch: Patch | None = None) -> Iterator[str]:
    """Yield subclasses that override a patched method, as ``"module.Class.method"``."""
    subclasses: list[type] = manager_class.__subclasses__()
    for subclass in subclasses:
        for name in (patch or RETIREMENT).methods:
            if name in vars(subclass):
                yield f"{subclass.__module__}.{subclass.__qualname__}.{name}"
        yield from overriding_subclasses(subclass, patch)


def describe(function: object) -> str:
    """Return where a method is defined, as ``module.qualname``."""
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
    """Return the manager's `Retirement`, made on first use: managers may predate the patch."""
    try:
        found: Retirement = manager._mamba_retirement
    except AttributeError:
        found = Retirement(manager._null_block, installed.counters)
        installed.managers.append(ref(manager))
        setattr(manager, _STATE, found)
        setattr(manager, _WATERMARKS, found.watermarks)
    return found


def exempt(manager: Any) -> None:
    """Do not count calls on this manager; for the probe, whose calls are no traffic."""
    setattr(manager, _STATE, Retirement(manager._null_block, Counters()))


def _remove_range(manager_class: type, installed: Installation) -> Callable[..., None]:
    stock = replaced(manager_class, installed, REMOVE_RANGE)

    def _remove_blocks_in_range(
        self: Any, request_id: str, first_block: int, last_block: int
    ) -> None:
        if self.mamba_cache_mode != "align":
            stock(self, request_id, first_block, last_block)
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

    return _remove_blocks_in_range


def _pop_blocks(manager_class: type, installed: Installation) -> Callable[..., Any]:
    pop = replaced(manager_class, installed, POP_BLOCKS)

    def pop_blocks_for_free(self: Any, request_id: str) -> Any:
        _state(self, installed).forget(request_id)
        return pop(self, request_id)

    return pop_blocks_for_free


# The clean-up goes first: a request that ends between the two leaves no watermark.
RETIREMENT: Final = Patch(
    name="retirement",
    parameters={
        POP_BLOCKS: ("self", "request_id"),
        REMOVE_RANGE: ("self", "request_id", "first_block", "last_block"),
    },
    methods={POP_BLOCKS: _pop_blocks, REMOVE_RANGE: _remove_range},
    counters=Counters,
    attributes=(_STATE, _WATERMARKS),
)
