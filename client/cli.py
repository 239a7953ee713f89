"""The command line: `kvpool generate`, `chat`, `ps`, `top` and the rest. Exit codes: 0 done, 1 an error (one line on
stderr), 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from . import (
    cli_admin,
    cli_chat,
    cli_doctor,
    cli_gateway,
    cli_generate,
    cli_ps,
    cli_stats,
    cli_status,
    cli_tools,
    cli_top,
)
from .errors import KVPoolError

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 0, 1, 2, 130, 141

MODULES = (
    cli_generate, cli_chat, cli_ps, cli_top, cli_status, cli_stats, cli_admin, cli_gateway, cli_doctor, cli_tools,
)  # fmt: skip

Command = Callable[[argparse.Namespace], int]


def parser() -> argparse.ArgumentParser:
    """Every command with its flags; `command` of the result is the function to call."""
    top = argparse.ArgumentParser(prog="kvpool", description="Use and look at a kvpool daemon.")
    top.add_argument(
        "--address", metavar="PATH", help="the daemon's socket (default: $KVPOOL_ADDRESS, else where one is found)"
    )
    top.add_argument("--version", action="version", version=f"kvpool {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in MODULES:
        module.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
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
    except BrokenPipeError:
        # Whoever read us has enough; Python must not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


if __name__ == "__main__":
    sys.exit(main())
