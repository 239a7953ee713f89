"""The house rules that a reader relies on: which room may import which, and what a wheel contains."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("client", "daemon", "model", "cuda_kernels", "cpu_kernels", "systemd")

ARROWS: dict[str, set[str]] = {
    "client": set(),
    "daemon": {"client", "model", "cpu_kernels"},
    "model": {"cuda_kernels", "cpu_kernels"},
    "cuda_kernels": set(),
    "cpu_kernels": set(),
    "systemd": set(),
}

# Inside a room: what each folder may import of its siblings. Files at the top of a room put the parts together, and may
# import all of them; "." lets a folder import those.
INNER_ARROWS: dict[str, dict[str, set[str]]] = {
    "client": {
        "wire": set(),
        "arena": {".", "wire"},
        "cli": {".", "wire", "arena", "gateway"},
        "gateway": {".", "wire"},
    },
    "daemon": {
        "memory": set(),
        "scheduling": {"memory"},
        "settings": {"scheduling"},
        "persistence": {"settings"},
        "engine": {"memory", "scheduling", "persistence"},
        "system": {"settings"},
        "serving": {"memory", "scheduling", "persistence", "engine", "settings", "system"},
    },
    "model": {
        "families": {"."},
        "files": {".", "families"},
        "text": {".", "files"},
        "cpu": {"."},
        "cuda": {"."},
    },
}

# Third-party packages that only some rooms may import; every other dependency is free to all but the client.
RESERVED: dict[str, set[str]] = {
    "numba": {"cpu_kernels", "cuda_kernels"},
    "llvmlite": {"cpu_kernels", "cuda_kernels"},
    "cupy": {"cuda_kernels", "model/cuda/backend.py", "model/cuda/device.py"},
    "zmq": {"client", "daemon"},
    "aiohttp": {"client/gateway/app.py", "client/gateway/server.py"},
    "torch": set(),
    "pickle": set(),
}
# The last two are optional: see test_client_imports_what_is_optional_lazily.
CLIENT_MAY_IMPORT = {"zmq", "msgpack", "numpy", "rich", "aiohttp"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module as an absolute dotted name, kvpool's own as `kvpool.room...`."""
    package = ("kvpool", *path.parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "kvpool":
                for alias in node.names:
                    yield f"kvpool.{alias.name}", node.lineno
            else:
                yield module, node.lineno


def test_rooms_import_only_along_the_arrows() -> None:
    wrong = []
    for path, tree in sources():
        room = path.parts[0]
        for name, line in imported(path, tree):
            parts = name.split(".")
            if parts[0] == "kvpool" and len(parts) > 1 and parts[1] in ROOMS and parts[1] not in {room, *ARROWS[room]}:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_folders_of_a_room_import_only_along_their_arrows() -> None:
    wrong = []
    for path, tree in sources():
        room, folder = path.parts[0], path.parts[1]
        if room not in INNER_ARROWS or len(path.parts) < 3:
            continue
        allowed = {folder, *INNER_ARROWS[room][folder]}
        for name, line in imported(path, tree):
            parts = name.split(".")
            if parts[:2] != ["kvpool", room]:
                continue
            target = parts[2] if len(parts) > 2 and parts[2] in INNER_ARROWS[room] else "."
            if target not in allowed:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_a_room_has_its_arrows() -> None:
    on_disk = {room: {path.parent.name for path in (ROOT / room).glob("*/__init__.py")} for room in INNER_ARROWS}
    assert on_disk == {room: set(folders) for room, folders in INNER_ARROWS.items()}


def test_reserved_packages_stay_in_their_rooms() -> None:
    wrong = []
    for path, tree in sources():
        for name, line in imported(path, tree):
            allowed = RESERVED.get(name.split(".")[0])
            if allowed is not None and path.parts[0] not in allowed and str(path) not in allowed:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_client_needs_only_its_three_dependencies() -> None:
    import sys

    wrong = []
    for path, tree in sources():
        if path.parts[0] != "client":
            continue
        for name, line in imported(path, tree):
            top = name.split(".")[0]
            if top != "kvpool" and top not in CLIENT_MAY_IMPORT and top not in sys.stdlib_module_names:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_client_imports_what_is_optional_lazily() -> None:
    at_module_level = [
        f"{path}:{node.lineno} imports {name}"
        for path, tree in sources()
        if path.parts[:2] != ("client", "gateway") and path.parts[0] == "client"
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name, _ in imported(path, node)
        if name.split(".")[0] in {"rich", "aiohttp"} or name.startswith("kvpool.client.gateway")
    ]
    assert not at_module_level, "\n".join(at_module_level)


def test_package_list_matches_the_disk() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {"kvpool"} | {
        "kvpool." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert declared == on_disk


def test_root_module_is_inert() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    kinds = [type(node).__name__ for node in tree.body]
    assert kinds == ["Expr", "Assign"], "the root holds a docstring and __version__, nothing else"
    assert [p.name for p in ROOT.glob("*.py")] == ["__init__.py"]


def test_no_assert_guards_the_product() -> None:
    """`python -O` removes asserts, so none may stand outside the tests."""
    found = [
        f"{path}:{node.lineno}" for path, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Assert)
    ]
    assert not found


def test_no_dynamic_code() -> None:
    banned = {"eval", "exec", "compile", "__import__"}
    found = [
        f"{path}:{node.lineno} {node.func.id}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in banned
    ]
    assert not found


def test_long_files_say_why() -> None:
    """A file over 400 lines states its reason in the docstring, after the words `Long because`."""
    silent = []
    for path, tree in sources():
        lines = (ROOT / path).read_text().count("\n")
        if lines > 420 and "Long because" not in (ast.get_docstring(tree) or ""):
            silent.append(f"{path}: {lines} lines")
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "PROTOCOL.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"]
)
def test_documents_exist(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500
