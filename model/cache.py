"""Where kvpool keeps files that it can always fetch or make again: pulled models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The first that is set of $CACHE_DIRECTORY (systemd's), $KVPOOL_CACHE_DIR, $XDG_CACHE_HOME/kvpool; else
    ~/.cache/kvpool. Read from the environment at every call; the directory may not exist yet."""
    if by_systemd := os.environ.get("CACHE_DIRECTORY"):
        return Path(by_systemd.split(":")[0])
    if own := os.environ.get("KVPOOL_CACHE_DIR"):
        return Path(own).expanduser()
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "kvpool"
    return Path(os.path.expanduser("~")) / ".cache" / "kvpool"
