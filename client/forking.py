"""What must happen in a child process right after fork: objects that hold sockets or locks let go of the parent's."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod

_hooks: list[WeakMethod[Callable[[], None]]] = []
_installed = False


def after_fork_in_child(method: Callable[[], None]) -> None:
    """Call this bound method in every child forked from now on, as long as its object lives."""
    global _installed
    if not _installed:
        os.register_at_fork(after_in_child=_run)
        _installed = True
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(WeakMethod(method))


def _run() -> None:
    for hook in _hooks:
        method = hook()
        if method is not None:
            method()
