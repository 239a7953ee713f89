"""Commands that change something: `kvpool cancel`, `drain`, `reload`, `resize`, `keygen`; the audit `fsck`; a
recording of what the daemon does, `trace`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..client import Client
from ..curve import KEY_FILE_NAME, SERVER_KEY_NAME, write_key_files
from ..wire.errors import InvalidArgument
from .figures import parse_size, show_bytes


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("cancel", help="end a request")
    command.add_argument("id", help="a request's name or a sequence's number, as ps shows them")
    command.set_defaults(command=cancel)
    commands.add_parser("drain", help="take no new work, finish what runs, stop").set_defaults(command=drain)
    commands.add_parser("reload", help="read the configuration again").set_defaults(command=reload)
    command = commands.add_parser("resize", help="give the pool another size")
    command.add_argument("size", help="20GiB, 512MiB or bytes")
    command.set_defaults(command=resize)
    commands.add_parser("fsck", help="audit the pool").set_defaults(command=fsck)
    command = commands.add_parser("trace", help="record what the daemon does, for ui.perfetto.dev")
    command.add_argument("--seconds", type=float, default=5.0, help="how long (default: 5)")
    command.add_argument("--output", type=Path, default=Path("kvpool-trace.json"), help="default: kvpool-trace.json")
    command.set_defaults(command=trace)
    command = commands.add_parser("keygen", help="make keys for a daemon or a client of tcp://")
    command.add_argument("file", type=Path, help="where the keys go; the public one alone goes to FILE.pub")
    command.set_defaults(command=keygen)


def _pool(options: argparse.Namespace) -> Client:
    return Client(options.address, client_name="kvpool")


def cancel(options: argparse.Namespace) -> int:
    with _pool(options) as pool:
        count = pool.cancel(options.id).get("cancelled", 1)
    print(f"cancelled {count} request{'' if count == 1 else 's'}")
    return 0


def drain(options: argparse.Namespace) -> int:
    with _pool(options) as pool:
        pool.drain()
    print("draining")
    return 0


def reload(options: argparse.Namespace) -> int:
    with _pool(options) as pool:
        changed = pool.reload().get("changed", ())
    print(f"reloaded: {', '.join(changed)}" if changed else "reloaded: nothing has changed")
    return 0


def resize(options: argparse.Namespace) -> int:
    pool_bytes = parse_size(options.size)
    with _pool(options) as pool:
        pool.resize(pool_bytes)
    print(f"the pool has {show_bytes(pool_bytes)}")
    return 0


def fsck(options: argparse.Namespace) -> int:
    with _pool(options) as pool:
        report = pool.fsck()
    if report.get("consistent"):
        print("consistent")
        return 0
    for name, value in report.items():
        if name != "consistent":
            print(f"{name}: {value}")
    return 1


def trace(options: argparse.Namespace) -> int:
    if sys.stderr.isatty():
        print(f"recording for {options.seconds:g} s", file=sys.stderr)
    with _pool(options) as pool:
        recorded = pool.trace(options.seconds)
    try:
        options.output.write_text(json.dumps(recorded))
    except OSError as error:
        raise InvalidArgument(
            f"{options.output}: {error.strerror}; give --output a place to write", field="output"
        ) from None
    print(f"wrote {options.output}, {len(recorded['traceEvents']):,} events; open it at https://ui.perfetto.dev")
    return 0


def keygen(options: argparse.Namespace) -> int:
    path: Path = options.file
    public = write_key_files(path).public.decode()
    print(f"made {path} (for its owner only) and {path}.pub")
    print(f"a daemon's:  server_key_file = {str(path)!r}; its clients have {SERVER_KEY_NAME}='{public}'")
    print(f"a client's:  {KEY_FILE_NAME}={path}; the daemon's authorised_keys has the line")
    print(f"{path.stem} USER {public}")
    return 0
