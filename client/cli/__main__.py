"""The command line: `kvpool generate`, `chat`, `ps`, `top` and the rest. Exit codes: 0 done, 1 an error (one line on
stderr), 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from ... import __version__
from ..wire.errors import KVPoolError
from . import admin, chat, doctor, gateway, generate, ps, stats, status, tools, top

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 0, 1, 2, 130, 141

MODULES = (generate, chat, ps, top, status, stats, admin, gateway, doctor, tools)

Command = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """Every command with its flags; `command` of the result is the function to call."""
    root = argparse.ArgumentParser(prog="kvpool", description="Use and look at a kvpool daemon.")
    root.add_argument(
        "--address", metavar="PATH", help="the daemon's socket (default: $KVPOOL_ADDRESS, else where one is found)"
    )
    root.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in MODULES:
        module.add_commands(commands)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    _mend_streams()
    options = parser().parse_args(arguments)
    command: Command = options.command
    try:
        code = command(options)
        sys.stdout.flush()
        return code
    except KVPoolError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read us has enough
        _stop_writing()
        return EXIT_PIPE
    except UnicodeDecodeError as error:
        print(f"kvpool: the input is not {error.encoding} text", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        _stop_writing()
        what = f"{error.filename}: " if error.filename else ""
        print(f"kvpool: {what}{error.strerror or error}", file=sys.stderr)
        return EXIT_ERROR


def _mend_streams() -> None:
    """A stream may be closed, and a terminal may lack characters that a model writes: neither is a reason to fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _stop_writing() -> None:
    """Python must not complain again at exit about what it cannot write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
