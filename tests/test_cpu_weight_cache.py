"""Packed weights kept in a file: read back exactly, and never believed when anything about the file is wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.cpu import weight_cache
from kvpool.model.cpu import weights as cpu_weights
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.cpu.weight_cache import CHUNK_BYTES, WeightCache, cache_name
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Shape, tiny_program

NAME = "a-model"
SIZE = CHUNK_BYTES + 12_345


def weights(seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def stored(directory: Path, data: np.ndarray, name: str = NAME) -> Path:
    assert WeightCache(directory).store(name, data) == ""
    return directory / f"{name}.weights"


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    cache, data = WeightCache(tmp_path / "new" / "directory"), weights()
    assert not cache.load(NAME, np.zeros(SIZE, np.uint8))
    assert cache.store(NAME, data) == ""
    memory = np.zeros(SIZE, np.uint8)
    assert cache.load(NAME, memory)
    np.testing.assert_array_equal(memory, data)


@pytest.mark.parametrize(
    "at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, SIZE - 1, SIZE, SIZE + 40, SIZE + 64, SIZE + 95], ids=lambda at: f"byte{at}"
)
def test_one_wrong_bit_anywhere(at: int, tmp_path: Path) -> None:
    """In either chunk, in the digests, in the seal: the file is refused, removed, and can be made again."""
    file = stored(tmp_path, weights())
    damaged = bytearray(file.read_bytes())
    assert len(damaged) == SIZE + 96
    damaged[at] ^= 1
    file.write_bytes(damaged)
    memory = np.zeros(SIZE, np.uint8)
    assert not WeightCache(tmp_path).load(NAME, memory)
    assert not file.exists()
    stored(tmp_path, weights())
    assert WeightCache(tmp_path).load(NAME, memory)


@pytest.mark.parametrize("length", [0, 5, SIZE, SIZE + 95, SIZE + 97])
def test_a_file_of_another_length(length: int, tmp_path: Path) -> None:
    file = stored(tmp_path, weights())
    file.write_bytes(file.read_bytes()[:length].ljust(length, b"\0"))
    assert not WeightCache(tmp_path).load(NAME, np.zeros(SIZE, np.uint8))


def test_another_models_file_under_this_name(tmp_path: Path) -> None:
    """Whole in itself, but sealed for somebody else."""
    stored(tmp_path, weights(1), "other").rename(tmp_path / f"{NAME}.weights")
    assert not WeightCache(tmp_path).load(NAME, np.zeros(SIZE, np.uint8))


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    data = weights(size=1000)
    for age, name in enumerate(("old", "older", "oldest")):
        os.utime(stored(tmp_path, data, name), (1_000_000 - age, 1_000_000 - age))
    assert WeightCache(tmp_path).load("oldest", data.copy())  # used just now
    torn = tmp_path / "crash.part"
    torn.write_bytes(b"half")
    os.utime(torn, (1, 1))
    assert WeightCache(tmp_path, max_bytes=3000).store("new", data) == ""
    assert {path.name for path in tmp_path.iterdir()} == {"new.weights", "oldest.weights"}


def test_what_cannot_be_kept_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not enough space" in WeightCache(tmp_path, max_bytes=100).store(NAME, weights(size=1000))
    (tmp_path / "file").write_text("")
    assert "Not a directory" in WeightCache(tmp_path / "file" / "x").store(NAME, weights(size=10))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache.os, "fsync", full)
    assert "No space left" in WeightCache(tmp_path).store(NAME, weights(size=10))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_daemons_that_store_at_once(tmp_path: Path) -> None:
    data, problems = weights(), []
    threads = [
        threading.Thread(target=lambda: problems.append(WeightCache(tmp_path).store(NAME, data))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [""] * 4
    assert WeightCache(tmp_path).load(NAME, np.zeros(SIZE, np.uint8))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_name_depends_on_every_part_and_on_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {cache_name(parts) for parts in (["a", "b"], ["ab"], ["a", "c"], ["a", "b", ""])}
    assert len(names) == 4
    monkeypatch.setattr(weight_cache, "SOURCES", weight_cache.SOURCES[1:])
    assert cache_name(["a", "b"]) not in names
    monkeypatch.setattr(weight_cache, "LOADED_NS", 0)  # every source is younger than what runs
    assert cache_name(["a", "b"]) == ""


def test_a_back_end_packs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_weights, "WORTH_KEEPING_BYTES", 1)
    program, limits = tiny_program(Shape(num_layers=1)), BackendLimits(16, 4, 32, 64)

    def packed(dtype: str, model_hash: str) -> tuple[bytes, int]:
        counting = CountingCheckpoint(program)
        made = cpu_weights.pack_weights(
            program, counting, dtype, lambda *_: None, WeightCache(tmp_path / "weights"), model_hash
        )
        return made.memory.tobytes(), counting.loads

    first, loads = packed("bfloat16", "m1")
    assert loads > 0
    assert packed("bfloat16", "m1") == (first, 0)
    assert packed("bfloat16", "m2")[1] > 0
    assert packed("float32", "m1")[1] > 0
    for file in (tmp_path / "weights").iterdir():
        damaged = bytearray(file.read_bytes())
        damaged[100] ^= 0xFF
        file.write_bytes(damaged)
    assert packed("bfloat16", "m1") == (first, loads)
    backend = CpuBackend(program, CountingCheckpoint(program), limits, dtype="bfloat16", threads=1, model_hash="m1")
    assert backend.weights_bytes == len(first)
    backend.close()


class CountingCheckpoint(RandomCheckpoint):
    loads = 0

    def load(self, name: str) -> np.ndarray:
        self.loads += 1
        return super().load(name)

    def raw(self, name: str):  # type: ignore[no-untyped-def]
        before = self.loads
        raw = super().raw(name)
        self.loads = before  # only asked what it is
        return raw
