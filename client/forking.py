"""What must happen around a fork: in the child, objects that hold sockets or locks let go of the parent's; in the
parent, what the child has too is not used again."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from weakref import WeakMethod

_Hooks = dict[int, WeakMethod[Callable[[], None]]]

_in_child: _Hooks = {}
_in_parent: _Hooks = {}
_numbers = itertools.count()
_forking: set[int] = set()  # threads
_installed = False


def after_fork_in_child(method: Callable[[], None]) -> None:
    """Call this bound method in every child forked from now on, as long as its object lives."""
    _add(_in_child, method)


def after_fork_in_parent(method: Callable[[], None]) -> None:
    """Call this bound method in this process after every fork from now on, as long as its object lives."""
    _add(_in_parent, method)


def forking() -> bool:
    """Whether some thread is forking: what ends now may live on in the child. The hooks come afterwards."""
    return bool(_forking)


def _add(hooks: _Hooks, method: Callable[[], None]) -> None:
    global _installed
    if not _installed:
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        _installed = True
    for number, hook in list(hooks.items()):
        if hook() is None:
            hooks.pop(number, None)
    hooks[next(_numbers)] = WeakMethod(method)


def _before() -> None:
    _forking.add(threading.get_ident())


def _after_in_parent() -> None:
    try:
        _run(_in_parent)
    finally:
        _forking.discard(threading.get_ident())


def _after_in_child() -> None:
    _forking.clear()
    _run(_in_child)


def _run(hooks: _Hooks) -> None:
    for hook in list(hooks.values()):
        method = hook()
        if method is not None:
            method()
