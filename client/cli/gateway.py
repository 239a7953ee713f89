"""`kvpool gateway`: OpenAI's HTTP API in front of the daemon. It needs aiohttp, which the client alone does not."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from ..wire.errors import Unsupported

MODES = (0o600, 0o660, 0o666)


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "gateway",
        help="serve OpenAI's HTTP API",
        description="Serve OpenAI's HTTP API (models, completions, chat completions, embeddings) in front of the "
        "daemon. All it asks of the daemon counts as this process's user.",
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    where.add_argument("--socket", type=Path, metavar="PATH", help="listen at a Unix socket instead")
    command.add_argument("--port", type=_port, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    command.add_argument(
        "--socket-mode", type=_mode, default=0o600, metavar="MODE", help="0600 (default), 0660 or 0666"
    )
    command.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="who has one of the keys in it may come in; one a line"
    )
    command.set_defaults(command=gateway)


def gateway(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise Unsupported("the gateway needs aiohttp; install it with pip install 'kvpool[gateway]'")
    from ..gateway.server import Listen, serve

    listen = Listen(options.host, options.port, options.socket, options.socket_mode, options.api_key_file)
    return serve(options.address, listen)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be from 0 to 65535")
    return int(text)


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if mode not in MODES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(f'{mode:04o}' for mode in MODES)}")
    return mode
