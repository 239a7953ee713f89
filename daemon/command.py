"""`kvpoold` as it is installed: without the daemon's packages it says what to install."""

from __future__ import annotations

import gc
import sys

from ..client.cli.tools import missing_packages


def main() -> int:
    """Run the daemon with the command line's arguments. Returns the exit code."""
    gc.disable()  # until it serves: a start makes a million objects and throws few away
    if missing := missing_packages():
        print(f"kvpoold: needs {', '.join(missing)}; install them with pip install 'kvpool[daemon]'", file=sys.stderr)
        return 1
    try:
        from .__main__ import main as run
    except KeyboardInterrupt:
        return 130
    return run()
