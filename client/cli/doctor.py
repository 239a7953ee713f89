"""`kvpool doctor`: why it does not start, or cannot be reached. One line for each thing that can be wrong."""

from __future__ import annotations

import argparse
import grp
import importlib.metadata
import json
import os
import platform
import pwd
import resource
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ..address import Address, RemoteAddress, candidate_addresses, resolve_address
from ..client import Client
from ..wire.errors import KVPoolError
from ..wire.messages import PROTOCOL_VERSION, Welcome
from .terminal import BOLD, DIM, GREEN, PLAIN, RED, UNLIMITED, YELLOW, Line, Terminal, safe
from .tools import TOOLS, missing_packages

PACKAGES = ("pyzmq", "msgpack", "numpy")
MIN_DESCRIPTORS = 1024
CONNECT_TIMEOUT_S = 3.0
DETAIL_COLUMN, ADVICE_COLUMN, MIN_COLUMNS = 24, 11, 20


@dataclass(frozen=True, slots=True)
class Finding:
    """`ok`: None where it is no problem but worth knowing. `advice` says what to do."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("doctor", help="why it does not start")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    findings = []
    terminal = Terminal.of(sys.stdout, os.environ, piped_width=UNLIMITED)
    for finding in examine(options.address, os.environ):
        findings.append(finding)
        if not options.json:
            for line in _lines(finding, terminal.width):
                print(terminal.show(line), flush=True)
    if options.json:
        print(json.dumps([{name: getattr(f, name) for name in ("name", "ok", "detail", "advice")} for f in findings]))
    return 1 if any(finding.ok is False for finding in findings) else 0


def _lines(finding: Finding, width: int) -> Iterator[Line]:
    """Nothing is cut off: what does not fit goes on below."""
    mark, style = {True: ("ok", GREEN), False: ("problem", RED), None: ("note", YELLOW)}[finding.ok]
    first, *rest = _wrapped(finding.detail, width - DETAIL_COLUMN) or [""]
    yield [(f"{mark:<8}", style), (f"{finding.name:<16}", BOLD), (first, PLAIN)]
    for text in rest:
        yield [(" " * DETAIL_COLUMN + text, PLAIN)]
    for number, text in enumerate(_wrapped(finding.advice, width - ADVICE_COLUMN)):
        yield [(("-> " if number == 0 else "   ").rjust(ADVICE_COLUMN), PLAIN), (text, DIM)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(safe(text), max(width, MIN_COLUMNS), break_on_hyphens=False)


def examine(address: str | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every check in order, from the interpreter to the running daemon."""
    yield Finding("python", True, f"{platform.python_version()}, {sys.executable}")
    yield from map(_package, PACKAGES)
    yield _descriptors()
    found: Address | RemoteAddress
    try:
        found = resolve_address(address, environ)
    except KVPoolError as error:
        yield Finding("address", False, str(error))
        found = candidate_addresses(environ)[0]
    else:
        yield Finding("address", True, str(found))
    if isinstance(found, Address):
        yield from _socket(found)
        yield _lock(found)
    yield from _daemon(found)
    yield from _daemon_half()


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "is not installed", f"pip install {name}")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= MIN_DESCRIPTORS or soft == resource.RLIM_INFINITY
    advice = "" if enough else f"raise it (ulimit -n {MIN_DESCRIPTORS}): a client needs two in the daemon"
    return Finding("open files", enough, f"{soft} of {hard} allowed", advice)


def _socket(address: Address) -> Iterator[Finding]:
    directory = address.path.parent
    if not directory.is_dir():
        advice = f"create it (sudo install -d -o {_me()} {directory}), or set address to a path you may write"
        yield Finding("directory", False, f"{directory} does not exist", advice)
        return
    yield Finding("directory", True, f"{directory} {_mode(directory)}")
    for path in (address.path, address.lifeline_path):
        try:
            yield _one_socket(path)
        except PermissionError:
            yield Finding("socket", False, f"{path} cannot be looked at", f"you may not enter {directory}")


def _one_socket(path: Path) -> Finding:
    if not path.exists():
        return Finding("socket", False, f"{path} does not exist", "start kvpoold")
    if not stat.S_ISSOCK(path.stat().st_mode):
        return Finding("socket", False, f"{path} is no socket", "remove it, then start kvpoold")
    if not os.access(path, os.W_OK):
        advice = f"ask for membership of group {_group(path)}, or let kvpoold set socket_mode and socket_group"
        return Finding("socket", False, f"{path} {_mode(path)} is closed to {_me()}", advice)
    return Finding("socket", True, f"{path} {_mode(path)}")


def _lock(address: Address) -> Finding:
    path = address.path.with_name(address.path.name + ".lock")
    try:
        pid = path.read_text().strip()
        command = Path(f"/proc/{int(pid)}/comm").read_text().strip()
    except FileNotFoundError:
        if path.exists():
            return Finding("lock", False, f"{path} names process {pid}, which is gone", "start kvpoold again")
        return Finding("lock", None, f"{path} does not exist: no daemon holds this address")
    except (OSError, ValueError) as error:
        return Finding("lock", None, f"{path} cannot be read: {error}")
    return Finding("lock", True, f"held by process {pid} ({command})")


def _daemon(address: Address | RemoteAddress) -> Iterator[Finding]:
    try:
        with Client(str(address), timeout_s=CONNECT_TIMEOUT_S, client_name="kvpool doctor") as pool:
            welcome = pool.connect()
            figures = pool.stats()
    except KVPoolError as error:
        yield Finding("daemon", False, str(error), _log_advice())
        return
    yield Finding("daemon", True, f"{welcome.model}, {welcome.limits.num_blocks} blocks, epoch {welcome.epoch}")
    yield _versions(welcome)
    if figures.get("draining"):
        yield Finding("state", False, "draining: it takes no new work", "wait until it has stopped, and start it again")
    yield from _journal(figures)


def _journal(figures: Mapping[str, Any]) -> Iterator[Finding]:
    state = figures.get("journal")
    if state == "suspended":
        reason = f"suspended, so a restart would lose what runs: {figures.get('journal_reason')}"
        yield Finding("journal", False, reason, "make room there and let the daemon write; it tries again by itself")
    elif state is not None:
        yield Finding("journal", True if state == "on" else None, str(state))


def _versions(welcome: Welcome) -> Finding:
    ours, theirs = f"client {__version__} ({PROTOCOL_VERSION})", f"daemon {welcome.server} ({welcome.version})"
    same = welcome.server in ("", __version__)
    return Finding("versions", True if same else None, f"{ours}, {theirs}")


def _daemon_half() -> Iterator[Finding]:
    """What only the daemon's packages can tell (kernel cache, devices, models), from a process that has them."""
    missing = missing_packages()
    if missing:
        advice = "only needed to run a daemon here: pip install 'kvpool[daemon]'"
        yield Finding("daemon extra", None, f"{', '.join(missing)} not installed", advice)
        return
    run = subprocess.run([sys.executable, "-m", TOOLS, "doctor"], check=False, capture_output=True, text=True)
    try:
        for finding in json.loads(run.stdout):
            yield Finding(finding["name"], finding["ok"], finding["detail"], finding.get("advice", ""))
    except (ValueError, KeyError, TypeError):
        last = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1]
        yield Finding("daemon extra", False, last, f"run {sys.executable} -m {TOOLS} doctor")


def _log_advice() -> str:
    return "its log says why (journalctl -u kvpoold, or run kvpoold in a terminal)"


def _mode(path: Path) -> str:
    found = path.stat()
    owner = _name(lambda: pwd.getpwuid(found.st_uid).pw_name, found.st_uid)
    return f"({stat.filemode(found.st_mode)} {owner}:{_group(path)})"


def _group(path: Path) -> str:
    gid = path.stat().st_gid
    return _name(lambda: grp.getgrgid(gid).gr_name, gid)


def _me() -> str:
    return _name(lambda: pwd.getpwuid(os.getuid()).pw_name, os.getuid())


def _name(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:
        return str(number)
