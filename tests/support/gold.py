"""Reference completions of real models, and the pulled models themselves where this machine has them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvpool.model.errors import ModelError
from kvpool.model.files.pull import resolve
from kvpool.model.loading import LoadedModel, load_model

_DIRECTORY = Path(__file__).resolve().parents[1] / "gold"


def gold_cases(name: str) -> list[dict[str, Any]]:
    """The cases of `name` ("smollm2-135m", "gemma3-270m"); see the README beside them."""
    cases: list[dict[str, Any]] = json.loads((_DIRECTORY / f"{name}.json").read_text())["cases"]
    return cases


def pulled_model_path(name: str) -> Path:
    """The pulled model's file; skips the test, saying what to type, where it has not been pulled."""
    try:
        return resolve(name)
    except ModelError as error:
        pytest.skip(str(error))


@cache
def _load(path: Path) -> LoadedModel:
    return load_model(path)


def pulled_model(name: str) -> LoadedModel:
    """The pulled model, loaded once a process; skips like `pulled_model_path`."""
    return _load(pulled_model_path(name))
