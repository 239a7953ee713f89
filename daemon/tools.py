"""`python -m kvpool.daemon.tools`: what `kvpool pull`, `convert`, `service` and `doctor` need the daemon's side for."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..model.cache import cache_directory
from ..model.errors import ModelError
from ..model.files import pull
from ..model.host import available_memory, usable_cpus
from ..model.progress import progress_display
from .settings import config as configuration
from .settings.options import ConfigError, show_size
from .system import service_install

PACKAGES = ("numba", "llvmlite", "safetensors", "tokenizers", "gguf", "jinja2", "ml_dtypes")

SERVICE_ACTIONS = {
    "install": service_install.install,
    "uninstall": service_install.uninstall,
    "status": service_install.status,
}

Finding = dict[str, Any]
"""`name`, `ok` (None: worth knowing, no problem), `detail`, and `advice` where something can be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.daemon.tools", description="The daemon's own tools.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("pull", help="fetch a model into the cache")
    command.add_argument("name", nargs="+")
    command.set_defaults(run=lambda options: pull.main(options.name))
    command = commands.add_parser("convert", help="make a Hugging Face directory of a GGUF file")
    command.add_argument("gguf", type=Path)
    command.add_argument("outdir", type=Path)
    command.set_defaults(run=lambda options: convert_file(options.gguf, options.outdir))
    command = commands.add_parser("service", help="the systemd service: put its files in place, or look at them")
    command.add_argument("action", choices=tuple(SERVICE_ACTIONS))
    command.add_argument("--user", action="store_true")
    command.add_argument("--root", type=Path, default=Path("/"))
    command.set_defaults(run=service)
    commands.add_parser("doctor", help="what could keep a daemon from starting, as JSON").set_defaults(run=doctor)
    commands.add_parser("models", help="the models that can be pulled").set_defaults(run=models)
    commands.add_parser("settings", help="the table of settings as Markdown").set_defaults(run=settings)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


def convert_file(source: Path, target: Path) -> int:
    from .convert import convert

    try:
        with progress_display(source.name) as progress:
            convert(source, target, progress)
    except ModelError as error:
        print(f"kvpool convert: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


def service(options: argparse.Namespace) -> int:
    try:
        lines = SERVICE_ACTIONS[options.action](root=options.root, user=options.user)
    except service_install.ServiceError as error:
        print(f"kvpool service: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def settings(options: argparse.Namespace) -> int:
    print(configuration.reference(), end="")
    return 0


def models(options: argparse.Namespace) -> int:
    """One line per model of the catalogue: name, size, licence, and where it lies if it is here."""
    for name, source in pull.CATALOGUE.items():
        path = pull.pulled_path(name)
        where = str(path) if path.exists() else f"kvpool pull {name}"
        print(f"{name:<16}{show_size(source.size_bytes):>12}  {source.licence:<22}{where}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Prints a JSON array of findings, for `kvpool doctor` to show."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # a check that fails is a finding, too
            findings.append({"name": check.__name__.strip("_"), "ok": False, "detail": f"cannot be checked: {error}"})
    print(json.dumps(findings))
    return 0


def _packages() -> Iterator[Finding]:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield {"name": name, "ok": False, "detail": "is not installed", "advice": "pip install 'kvpool[daemon]'"}
    yield {"name": "packages", "ok": True, "detail": ", ".join(versions)}


def _machine() -> Iterator[Finding]:
    memory = show_size(available_memory())
    yield {"name": "machine", "ok": True, "detail": f"{usable_cpus()} processors, {memory} of memory free"}
    nvidia = Path("/proc/driver/nvidia/version")
    yield {
        "name": "gpu",
        "ok": None,
        "detail": "an NVIDIA driver is loaded" if nvidia.exists() else "none; the CPU serves",
    }


def _cache() -> Iterator[Finding]:
    directory = cache_directory()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        yield {"name": "cache", "ok": True, "detail": str(directory)}
    else:
        yield {
            "name": "cache",
            "ok": False,
            "detail": f"{directory} cannot be written; kernels are compiled at every start",
            "advice": "set KVPOOL_CACHE_DIR to a directory that can",
        }


def _models() -> Iterator[Finding]:
    here = [name for name in pull.CATALOGUE if pull.pulled_path(name).exists()]
    missing = {"ok": None, "detail": "none pulled yet", "advice": "kvpool pull smollm2-135m"}
    yield {"name": "models"} | ({"ok": True, "detail": ", ".join(here)} if here else missing)


def _settings() -> Iterator[Finding]:
    file = configuration.find_file(None, os.environ)
    try:
        configuration.load({}, os.environ, file)
    except ConfigError as error:
        yield {"name": "settings", "ok": False, "detail": str(error), "advice": "correct it; kvpoold --check-config"}
    else:
        yield {"name": "settings", "ok": True, "detail": str(file) if file else "no configuration file, defaults"}


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_packages, _machine, _cache, _models, _settings)


if __name__ == "__main__":
    sys.exit(main())
