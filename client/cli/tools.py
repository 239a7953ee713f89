"""`kvpool pull`, `convert` and `service`: they need the daemon's packages, so they run in a process of its tools."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..wire.errors import Unsupported

TOOLS = "kvpool.daemon.tools"
REQUIRED = ("numba", "safetensors", "tokenizers", "gguf", "jinja2", "ml_dtypes")
"""Of the `daemon` extra; what is missing is named before anything is started."""


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("pull", help="fetch a model into the cache")
    command.add_argument("name", help="such as smollm2-135m")
    command.set_defaults(command=lambda options: run_tool(["pull", options.name]))
    command = commands.add_parser("convert", help="make a Hugging Face directory of a GGUF file")
    command.add_argument("gguf", help="the file")
    command.add_argument("outdir", help="the directory to make")
    command.set_defaults(command=lambda options: run_tool(["convert", options.gguf, options.outdir]))
    command = commands.add_parser("service", help="install, remove or look at the systemd service")
    command.add_argument("action", choices=("install", "uninstall", "status"))
    command.add_argument("--user", action="store_true", help="a service of your own, without root")
    command.add_argument("--root", default="/", metavar="DIR", help="write below DIR, and run no systemd command")
    command.set_defaults(command=_service)


def _service(options: argparse.Namespace) -> int:
    user = ["--user"] if options.user else []
    return run_tool(["service", options.action, "--root", options.root, *user])


def missing_packages() -> list[str]:
    """Packages of the daemon extra that are not installed."""
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def run_tool(arguments: Sequence[str]) -> int:
    """Run one of the daemon's tools with this terminal, and return its exit code. Raises Unsupported, saying what to
    install, where the daemon's packages are missing."""
    missing = missing_packages()
    if missing:
        raise Unsupported(f"needs {', '.join(missing)}; install them with pip install 'kvpool[daemon]'")
    return subprocess.run([sys.executable, "-m", TOOLS, *arguments], check=False).returncode
