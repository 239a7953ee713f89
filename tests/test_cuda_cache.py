"""Compiled kernels on disk: used when right, made again when missing or damaged."""

from pathlib import Path

import pytest

from tests.support.cuda_rooms import cache, compiler


def made(calls: list[str]) -> compiler.Kernel:
    calls.append("compiled")
    return compiler.Kernel("name", ".version 8.0", (("x", "pointer"),), 128, 32, 16)


@pytest.fixture
def folder(tmp_path: Path) -> object:
    before = list(cache._folders)
    cache.use_folder(tmp_path / "kernels")
    yield tmp_path / "kernels"
    cache.use_folder(before[0] if before else None)


def test_a_kernel_is_read_back_as_it_was_written(folder: Path) -> None:
    calls: list[str] = []
    first = cache.kernel_factory(lambda wanted: made(calls))
    kernel = first("a")
    assert (folder.stat().st_mode & 0o777) == 0o700
    again = cache.kernel_factory(lambda wanted: made(calls))  # as a new process would
    again.__wrapped__.__qualname__ = first.__wrapped__.__qualname__
    assert again("a") == kernel == first("a")
    assert calls == ["compiled"]
    first("b")
    assert calls == ["compiled", "compiled"]


def test_a_damaged_file_is_replaced(folder: Path) -> None:
    calls: list[str] = []
    for damage in ("", "{", "[]", '{"name": 1}'):
        factory = cache.kernel_factory(lambda: made(calls))
        factory()
        (path,) = folder.iterdir()
        path.write_text(damage)
    assert len(calls) == 4


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    before = list(cache._folders)
    cache.use_folder(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    calls: list[str] = []
    assert cache.kernel_factory(lambda: made(calls))().name == "name"
    (tmp_path / "file").write_text("")
    assert "cannot be used" in cache.use_folder(tmp_path / "file" / "kernels")
    assert cache.kernel_factory(lambda: made(calls))().name == "name"
    assert calls == ["compiled", "compiled"]
    cache.use_folder(before[0] if before else None)
