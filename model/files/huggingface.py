"""A Hugging Face model directory: config.json as a ModelConfig, and its safetensors files as one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..errors import ModelError
from ..weights import Float32, RawTensor
from .rope_scaling import scaling_from_hugging_face
from .safetensors_file import SafetensorsFile

# model_type of config.json -> family. gemma3 is the multimodal wrapper, whose text half is used.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Multimodal checkpoints keep the language model under a prefix; canonical names do not have it.
TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError if the file is missing or is not a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); a model directory needs it") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error}); fetch the model again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the model again")
    return values


def hugging_face_config(directory: Path) -> ModelConfig:
    """config.json (and generation_config.json's end-of-sequence ids). Raises ModelError naming what does not fit."""
    path = directory / "config.json"
    values = read_json(path)
    family = MODEL_TYPES.get(str(values.get("model_type")))
    if family is None:
        kind = values.get("model_type")
        raise ModelError(f"{path}: model_type {kind!r} is not supported; known: {', '.join(MODEL_TYPES)}")
    if isinstance(values.get("text_config"), dict):
        values = values | values["text_config"]
    if values.get("quantization_config"):
        raise ModelError(f"{path}: quantization_config is not supported; take the unquantised model, or a GGUF file")
    generation = directory / "generation_config.json"
    end_ids = read_json(generation).get("eos_token_id") if generation.exists() else None
    try:
        return _config(family, values, end_ids)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {_describe(error)}") from error


def _config(family: str, values: Mapping[str, Any], end_ids: Any) -> ModelConfig:
    hidden, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    is_gemma = family == "gemma3"
    head_dim = values.get("head_dim") or (256 if is_gemma else hidden // heads)
    max_positions = values["max_position_embeddings"]
    rope = _rope_parameters(values)
    activation = (
        values.get("hidden_activation") or values.get("hidden_act") or ("gelu_pytorch_tanh" if is_gemma else "silu")
    )
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ModelConfig(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope["full"].get("rope_theta") or values.get("rope_theta") or (1e6 if is_gemma else 1e4)),
        rope_scaling=scaling_from_hugging_face(rope["full"], max_positions),
        rotary_dim=int(head_dim * (values.get("partial_rotary_factor") or 1.0)),
        rope_local_theta=_local_theta(values, rope) if is_gemma else 0.0,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", is_gemma)),
        attention_bias=bool(values.get("attention_bias", family == "qwen2")),
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        norm_weight_offset=1.0 if is_gemma else 0.0,
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        attention_scale=values.get("query_pre_attn_scalar", 256) ** -0.5 if is_gemma else 0.0,
        activation=ACTIVATIONS[activation],
        layer_windows=_windows(family, values, layers),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=_ids(values.get("eos_token_id"), end_ids),
    )


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`full` and `local` rotary settings. Transformers 5 writes rope_parameters, for Gemma one set per layer type."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if "full_attention" in parameters:
        return {"full": parameters["full_attention"], "local": parameters.get("sliding_attention") or {}}
    return {"full": parameters, "local": {}}


def _local_theta(values: Mapping[str, Any], rope: Mapping[str, Mapping[str, Any]]) -> float:
    return float(rope["local"].get("rope_theta") or values.get("rope_local_base_freq") or 10000.0)


def _windows(family: str, values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Each layer's window, 0 where it sees everything."""
    window = values.get("sliding_window") or 0
    is_qwen = family.startswith("qwen")
    if not window or family == "llama" or not values.get("use_sliding_window", not is_qwen):
        return ()
    kinds = values.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "gemma3":
        pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or 6
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    first = values.get("max_window_layers", 0) if is_qwen else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _ids(*sources: Any) -> tuple[int, ...]:
    """Distinct token ids out of numbers, lists of numbers and None."""
    found: list[int] = []
    for source in sources:
        found += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(found))


def _describe(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


class SafetensorsCheckpoint:
    """Fulfils `weights.Checkpoint` over model.safetensors, or over the shards that its index names."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelError if there are no weights, a shard is missing or damaged."""
        self.directory = directory
        self._files: dict[str, tuple[SafetensorsFile, str]] = {}  # canonical name -> file, name in it
        for path in weight_files(directory):
            file = SafetensorsFile(path)
            for name in file.names():
                self._files[_canonical(name)] = (file, name)

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self._find(name)
        return file.shape(stored)

    def raw(self, name: str) -> RawTensor:
        file, stored = self._find(name)
        return file.raw(stored)

    def load(self, name: str) -> Float32:
        values: Float32 = self.raw(name).data.astype(np.float32, copy=False)
        return values

    def _find(self, name: str) -> tuple[SafetensorsFile, str]:
        if name not in self._files:
            raise ModelError(f"{self.directory}: tensor {name} is missing; the directory does not hold a whole model")
        return self._files[name]


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors, or the shards of model.safetensors.index.json in order of name. Raises ModelError."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise ModelError(f"{directory}: no model.safetensors in it; other weight formats must be converted first")
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{index}: no weight_map in it; fetch the model again")
    paths = [directory / name for name in sorted(set(shards.values()))]
    for path in paths:
        if path.parent != directory or not path.exists():
            raise ModelError(f"{path}: named by {index.name} but not there; fetch the model again")
    return paths


def _canonical(name: str) -> str:
    for prefix, replacement in TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
