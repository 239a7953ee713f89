"""`kvpool service install | uninstall | status`: put the unit files of this wheel in place, and say what was done.

Nothing is started or enabled: the last lines say which commands do that. `root` redirects every path, so that
packagers and tests can install into a folder; then no systemd tool is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path


@dataclass(frozen=True, slots=True)
class UnitFile:
    """One file of the wheel's `systemd` folder and where it goes; `keep` protects an administrator's edits."""

    source: str
    target: str
    keep: bool = False


SYSTEM_FILES = (
    UnitFile("kvpoold.service", "/etc/systemd/system/kvpoold.service"),
    UnitFile("kvpoold.socket", "/etc/systemd/system/kvpoold.socket"),
    UnitFile("kvpool-gateway.service", "/etc/systemd/system/kvpool-gateway.service"),
    UnitFile("kvpool.sysusers.conf", "/etc/sysusers.d/kvpool.conf"),
    UnitFile("kvpool.tmpfiles.conf", "/etc/tmpfiles.d/kvpool.conf"),
    UnitFile("kvpool.toml", "/etc/kvpool/kvpool.toml", keep=True),
)
SYSTEM_COMMANDS = (
    ("systemd-sysusers", "/etc/sysusers.d/kvpool.conf"),
    ("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/kvpool.conf"),
    ("systemctl", "daemon-reload"),
)
USER_COMMANDS = (("systemctl", "--user", "daemon-reload"),)


class ServiceError(RuntimeError):
    """The service cannot be installed as asked; the message says what to do."""


def user_files() -> tuple[UnitFile, ...]:
    """The files of a `systemctl --user` service, below the caller's own configuration folder."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return (
        UnitFile("kvpoold-user.service", f"{config}/systemd/user/kvpoold.service"),
        UnitFile("kvpool.toml", f"{config}/kvpool/kvpool.toml", keep=True),
    )


def command_path(name: str) -> str:
    """The absolute path of a command beside the running interpreter. Raises ServiceError where there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise ServiceError(f"{name} is not installed beside this Python; install kvpool[daemon] first")
    return found


def _text(file: UnitFile) -> str:
    """A file's text, with the paths of the commands that it names."""
    text = resources.files("kvpool.systemd").joinpath(file.source).read_text(encoding="utf-8")
    for name in ("kvpoold", "kvpool"):
        if (placeholder := f"@{name.upper()}@") in text:
            text = text.replace(placeholder, command_path(name))
    return text


def _place(root: Path, target: str) -> Path:
    return root / target.lstrip("/")


def _run_where_possible(commands: tuple[tuple[str, ...], ...], root: Path) -> list[str]:
    """Run each command that this machine has, unless installing into a folder; a line on each."""
    lines = []
    for command in commands:
        shown = " ".join(command)
        if root != Path("/") or not shutil.which(command[0]):
            lines.append(f"not run   {shown}")
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines.append(f"{'ran' if done.returncode == 0 else 'FAILED':<9} {shown} {done.stderr.strip()}".rstrip())
    return lines


def install(*, root: Path = Path("/"), user: bool = False) -> list[str]:
    """Write the unit files and reload systemd. Returns one line for each thing done. Raises ServiceError."""
    if not user and root == Path("/") and os.geteuid() != 0:
        raise ServiceError("a system service is installed by root; use sudo, or --user for your own")
    texts = {file: _text(file) for file in (user_files() if user else SYSTEM_FILES)}
    lines = []
    for file, text in texts.items():
        path = _place(root, file.target)
        if file.keep and path.exists():
            lines.append(f"kept      {path} (yours)")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        lines.append(f"wrote     {path}")
    lines += _run_where_possible(USER_COMMANDS if user else SYSTEM_COMMANDS, root)
    systemctl = "systemctl --user" if user else "systemctl"
    lines.append(f"next      {systemctl} enable --now kvpoold{'' if user else '.socket kvpoold'}")
    if not user:
        lines.append("next      usermod -aG kvpool NAME   (each user who may use the pool)")
    return lines


def uninstall(*, root: Path = Path("/"), user: bool = False) -> list[str]:
    """Stop and disable the service and remove its files; the configuration, caches and state stay."""
    if not user and root == Path("/") and os.geteuid() != 0:
        raise ServiceError("a system service is removed by root; use sudo, or --user for your own")
    units = ("kvpoold.service",) if user else ("kvpool-gateway.service", "kvpoold.socket", "kvpoold.service")
    systemctl = ("systemctl", "--user") if user else ("systemctl",)
    lines = _run_where_possible(((*systemctl, "disable", "--now", *units),), root)
    for file in user_files() if user else SYSTEM_FILES:
        path = _place(root, file.target)
        if file.keep:
            lines.append(f"kept      {path}")
        elif path.exists():
            path.unlink()
            lines.append(f"removed   {path}")
    return lines + _run_where_possible(((*systemctl, "daemon-reload"),), root)


def status(*, root: Path = Path("/"), user: bool = False) -> list[str]:
    """Which files are in place, and whether they are those of this wheel."""
    lines = []
    for file in user_files() if user else SYSTEM_FILES:
        path = _place(root, file.target)
        if not path.exists():
            state = "missing"
        elif file.keep:
            state = "present"
        else:
            state = "current" if path.read_text(encoding="utf-8") == _text(file) else "differs"
        lines.append(f"{state:<9} {path}")
    return lines
