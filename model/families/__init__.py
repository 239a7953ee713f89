"""Families: each file is one forward pass; this table says which file a model's family means."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ModelConfig
from ..program import Program
from . import gemma3, llama

PROGRAMS: dict[str, Callable[[ModelConfig], Program]] = {
    "gemma3": gemma3.program,
    "llama": llama.program,
    "mistral": llama.program,
    "qwen2": llama.program,
    "qwen3": llama.program,
}


def build_program(config: ModelConfig) -> Program:
    """The forward pass of `config`. Raises ValueError naming the families that exist."""
    program = PROGRAMS.get(config.family)
    if program is None:
        raise ValueError(f"model family {config.family!r} is not supported; known: {', '.join(sorted(PROGRAMS))}")
    return program(config)
