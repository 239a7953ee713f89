"""The daemon's tools: converting, and what doctor says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from kvpool.daemon import convert as conversion
from kvpool.daemon import tools
from kvpool.daemon.settings import config as configuration
from kvpool.model.loading import load_model
from kvpool.model.weights import load_weight
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama, write_tiny_model


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_converted_model_is_the_same_model(
    tmp_path: Path, kind: GGMLQuantizationType, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "SHARD_BYTES", 100_000)
    source = write_tiny_gguf(write_tiny_model(tmp_path / "hf", family), tmp_path / "tiny.gguf", kind)
    assert tools.main(["convert", str(source), str(tmp_path / "out")]) == 0
    before, after = load_model(source), load_model(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert after.config.layer_windows == before.config.layer_windows
    assert after.config.eos_token_ids == before.config.eos_token_ids
    for old, new in zip(before.program.weights(), after.program.weights(), strict=True):
        found, expected = load_weight(after.checkpoint, new), load_weight(before.checkpoint, old)
        if new.offset:
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found, expected)
    text = "The sea, 3 boats & <|im_end|>"
    for special in (False, True):
        assert after.tokenizer.encode(text, special=special) == before.tokenizer.encode(text, special=special)


def test_nothing_is_overwritten_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_llama(tmp_path / "hf")
    assert tools.main(["convert", str(directory), str(tmp_path / "out")]) == 1
    assert "only a GGUF file" in capsys.readouterr().err
    source = write_tiny_gguf(directory, tmp_path / "tiny.gguf")
    assert tools.main(["convert", str(source), str(directory)]) == 1
    assert "exists already" in capsys.readouterr().err
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(source.read_bytes()[:5000])
    assert tools.main(["convert", str(damaged), str(tmp_path / "out")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.gguf", "hf", "tiny.gguf"]


def test_doctor_speaks_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_THREADS", "none")
    monkeypatch.setenv("KVPOOL_CACHE_DIR", "/proc/nowhere")
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    assert tools.main(["doctor"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["packages"]["ok"]
    assert "numba" in findings["packages"]["detail"]
    assert findings["settings"]["ok"] is False
    assert findings["settings"]["detail"].startswith("KVPOOL_THREADS: 'none' cannot be used")
    assert findings["models"]["ok"] is None
    assert {"machine", "gpu", "cache"} <= set(findings)


def test_a_broken_check_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken() -> list[tools.Finding]:
        raise OSError("no disk")

    monkeypatch.setattr(tools, "CHECKS", (_broken,))
    assert tools.main(["doctor"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "broken", "ok": False, "detail": "cannot be checked: no disk"}
    ]


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert tools.main(["settings"]) == 0
    assert capsys.readouterr().out == configuration.reference()
