"""The unit files: what systemd's own tools say of them, and what installing them does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from kvpool.daemon.system import service_install
from kvpool.daemon.system.service_install import install, status, uninstall

UNITS = ("kvpoold.service", "kvpoold.socket", "kvpool-gateway.service")
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed here")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the system service installed into it; `true` stands for commands, which verify wants to exist."""
    monkeypatch.setattr(service_install, "command_path", lambda name: shutil.which("true"))
    install(root=tmp_path)
    return tmp_path


@needs_systemd
def test_systemd_verifies_the_units_without_a_word(installed: Path) -> None:
    units = installed / "etc/systemd/system"
    done = subprocess.run(
        ["systemd-analyze", "verify", *(units / name for name in UNITS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", ["kvpoold.service", "kvpool-gateway.service"])
def test_exposure_is_below_two(installed: Path, name: str) -> None:
    unit = installed / "etc/systemd/system" / name
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(rf"Overall exposure level for {name}: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) < 2.0


def test_identity_and_kernels_are_not_hardened_away() -> None:
    """PrivateUsers= would turn every peer into nobody; MemoryDenyWriteExecute= would stop the compiler."""
    text = (resources.files("kvpool.systemd") / "kvpoold.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings.get("PrivateUsers", "no") == "no"
    assert settings.get("MemoryDenyWriteExecute", "no") == "no"
    assert settings["Type"] == "notify"


def test_install_status_uninstall_keep_the_administrators_configuration(installed: Path) -> None:
    config = installed / "etc/kvpool/kvpool.toml"
    config.write_text("model = 'mine'\n")
    assert any(line.startswith("kept") for line in install(root=installed))
    assert config.read_text() == "model = 'mine'\n"
    assert {line.split()[0] for line in status(root=installed)} == {"current", "present"}
    (installed / "etc/systemd/system/kvpoold.service").write_text("[Service]\n")
    assert any(line.startswith("differs") for line in status(root=installed))
    uninstall(root=installed)
    left = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file()]
    assert left == [Path("etc/kvpool/kvpool.toml")]


def test_user_service_goes_below_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_install, "command_path", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/someone/.config")
    install(root=tmp_path, user=True)
    unit = (tmp_path / "home/someone/.config/systemd/user/kvpoold.service").read_text()
    assert "ExecStart=/usr/bin/kvpoold" in unit
    assert "User=" not in unit


def test_the_command_line_installs_into_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpool.client.cli", "service"]
    done = subprocess.run([*command, "install", "--root", tmp_path], capture_output=True, text=True, check=True)
    assert f"wrote     {tmp_path}/etc/systemd/system/kvpoold.service" in done.stdout
    shown = subprocess.run([*command, "status", "--root", tmp_path], capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == {"current", "present"}
