"""Puts the retirement on vLLM's `MambaManager` and takes it off again.

The class object is changed in place and never rebound: platform plug-ins subclass it, and other
modules hold it by reference. What stood there before is kept on the class, so that taking the
patch off restores the identical objects, and an attribute that was inherited is inherited again.

Everything that knows how the class of a live release is shaped is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

from .retirement import Counters, Watermarks, retire

REMOVE_RANGE: Final = "_remove_blocks_in_range"
POP_BLOCKS: Final = "pop_blocks_for_free"
PATCHED_METHODS: Final = (REMOVE_RANGE, POP_BLOCKS)
_MARK: Final = "__mamba_retire__"
_INHERITED: Final = object()


class BindingError(Exception):
    """The class cannot take the patch, or no longer carries it on top."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What was done to one class: what stood there before, what stands there now."""

    before: dict[str, object]
    after: dict[str, Callable[..., Any]]
    counters: Counters = field(default_factory=Counters)


def installation(manager_class: type) -> Installation | None:
    """The patch on this very class (not on a base of it), if any."""
    found = vars(manager_class).get(_MARK)
    return found if isinstance(found, Installation) else None


def is_ours(function: object) -> bool:
    """Whether a method was put in place by this package, in this or another copy of it."""
    # functools.wraps copies our mark onto a wrapper around our method.
    return type(function) is FunctionType and (
        _MARK in vars(function) and "__wrapped__" not in vars(function)
    )


def install(manager_class: type) -> Installation:
    """Put the retirement on `manager_class`; a second call changes nothing.

    Args:
        manager_class: vLLM's `MambaManager`, of a release with `_remove_blocks_in_range`
            (0.25.0 and later) and `pop_blocks_for_free` (0.24.0 and later).

    Returns:
        The record of what was changed.

    Raises:
        BindingError: the class lacks one of the two methods.
    """
    if present := installation(manager_class):
        return present
    missing = [name for name in PATCHED_METHODS if not callable(_lookup(manager_class, name))]
    if missing:
        raise BindingError(f"{manager_class.__qualname__} has no {' and no '.join(missing)}")
    counters = Counters()
    done = Installation(
        before={name: vars(manager_class).get(name, _INHERITED) for name in PATCHED_METHODS},
        after={
            REMOVE_RANGE: _remove_range(manager_class, counters),
            POP_BLOCKS: _pop_blocks(manager_class),
        },
        counters=counters,
    )
    # The clean-up goes first: a request that ends between the two lines leaves no watermark.
    for name in (POP_BLOCKS, REMOVE_RANGE):
        setattr(manager_class, name, done.after[name])
    setattr(manager_class, _MARK, done)
    return done


def uninstall(manager_class: type) -> bool:
    """Take the retirement off `manager_class`.

    Returns:
        Whether there was anything to take off.

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
        if before is _INHERITED:
            delattr(manager_class, name)
        else:
            setattr(manager_class, name, before)
    delattr(manager_class, _MARK)
    return True


def defining_class(manager_class: type, module_name: str) -> type:
    """vLLM's own `MambaManager`, also where the module's name was rebound to a subclass of it."""
    own = [c for c in manager_class.__mro__ if c.__module__ == module_name]
    return next((c for c in own if c.__name__ == "MambaManager"), manager_class)


def foreign_method(manager_class: type, names: tuple[str, ...], module_file: str) -> str | None:
    """The first of the named methods that the module's own source did not define.

    Args:
        manager_class: class to look at, with its bases.
        names: methods that the patch relies on.
        module_file: path of the file that defines the class.

    Returns:
        ``"method (whose)"``, or None where every method comes from `module_file`.
    """
    for name in names:
        function = _lookup(manager_class, name)
        if function is not None and not is_ours(function) and _file_of(function) != module_file:
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
        # functools.wraps gave it the name of what it wraps; its code knows better.
        return f"{function.__globals__.get('__name__')}.{function.__code__.co_name}"
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _lookup(manager_class: type, name: str) -> object | None:
    return next((vars(c)[name] for c in manager_class.__mro__ if name in vars(c)), None)


def _file_of(function: object) -> str | None:
    # A wrapper borrows the name (functools.wraps), or even what it answers for its code (wrapt).
    return function.__code__.co_filename if type(function) is FunctionType else None


def _watermarks(manager: Any) -> Watermarks:
    """The manager's watermarks, made on first use: it may be older than the patch."""
    try:
        found: Watermarks = manager._retirement_watermarks
    except AttributeError:
        found = manager._retirement_watermarks = Watermarks()
        # vLLM 0.30.0's name for the same numbers; public tools read it.
        manager._num_retired_blocks = found.blocks
    return found


def _remove_range(manager_class: type, counters: Counters) -> Callable[..., None]:
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
        retire(
            request_id,
            first_block,
            last_block,
            table,
            self._null_block,
            self.block_pool,
            _watermarks(self),
            counters,
            self.last_state_block_idx.get(request_id),
        )

    return _signed(_remove_blocks_in_range, manager_class)


def _pop_blocks(manager_class: type) -> Callable[..., Any]:
    own = vars(manager_class).get(POP_BLOCKS)

    def pop_blocks_for_free(self: Any, request_id: str) -> Any:
        _watermarks(self).forget(request_id)
        if own is not None:
            return own(self, request_id)
        parent: Any = super(manager_class, self)
        return parent.pop_blocks_for_free(request_id)

    return _signed(pop_blocks_for_free, manager_class)


def _signed(function: Callable[..., Any], manager_class: type) -> Callable[..., Any]:
    function.__qualname__ = f"{manager_class.__qualname__}.{function.__name__}"
    setattr(function, _MARK, True)
    return function
