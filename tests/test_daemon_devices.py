"""Which back end serves, and what a machine without the asked device is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvpool.daemon.settings.config import Config
from kvpool.daemon.settings.options import ConfigError
from kvpool.daemon.system import devices
from kvpool.daemon.system.devices import chosen_device, device_backend
from kvpool.model.backend import BackendLimits
from kvpool.model.loading import load_model
from tests.support.tiny_model import write_tiny_llama

LIMITS = BackendLimits(block_size=16, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)


def nothing(what: str, share: float) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize(("node", "cupy", "device"), [(False, True, "cpu"), (True, False, "cpu"), (True, True, "cuda")])
def test_auto_takes_a_card_that_can_be_used(
    node: bool, cupy: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "NVIDIA_NODES", (str(tmp_path if node else tmp_path / "missing"),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if cupy else None)
    assert chosen_device(Config()) == device


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_named_device_is_obeyed(device: str) -> None:
    assert chosen_device(Config(device=device)) == device


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_a_card_without_its_library_says_what_to_install(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path))
    with pytest.raises(ConfigError, match=r"install kvpool\[daemon,cuda13\]"):
        device_backend(Config(device="cuda"), model, LIMITS, nothing)


def test_a_format_that_the_device_has_not_is_an_error_of_the_settings(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path))
    with pytest.raises(ConfigError, match="kv_dtype"):
        device_backend(Config(device="cpu", kv_dtype="fp8"), model, LIMITS, nothing)
