"""A GGUF file as a Hugging Face directory: config.json, safetensors, tokenizer.json and tokenizer_config.json.

Quantised tensors become float32, which holds their values exactly. What was written is read back and must describe the
same model, before the directory gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ..model.config import ModelConfig, RopeScaling
from ..model.errors import ModelError
from ..model.loading import LoadedModel, load_model

Progress = Callable[[str, float], None]

SHARD_BYTES = 2 << 30
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
PLAIN_KINDS = ("F32", "F16")  # BF16 has no dtype in NumPy's own files: it widens to float32 without loss


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write `target`, which must not exist. Raises ModelError; then nothing of it is left."""
    if target.exists():
        raise ModelError(f"{target} exists already; name a directory that does not")
    model = load_model(source)
    if not source.is_file() or model.config.family not in MODEL_TYPES:
        raise ModelError(f"{source}: only a GGUF file can be converted")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_weights(model, partial, progress)
        _write_json(partial / "config.json", hugging_face_values(model.config))
        model.tokenizer.save(partial / "tokenizer.json")
        _write_json(partial / "tokenizer_config.json", _tokenizer_values(model))
        _check(model, partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hugging_face_values(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model, as Transformers names things."""
    values: dict[str, Any] = {
        "model_type": MODEL_TYPES[config.family],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": (config.rotary_dim or config.head_dim) / config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": ACTIVATIONS[config.activation],
        "hidden_activation": ACTIVATIONS[config.activation],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "float32",
    }
    if config.rope_scaling.kind != "none":
        values["rope_scaling"] = _rope_values(config.rope_scaling)
    if config.family == "gemma3":
        values["rope_local_base_freq"] = config.rope_local_theta
        values["query_pre_attn_scalar"] = config.attention_scale**-2 if config.attention_scale else config.head_dim
    if any(config.layer_windows):
        values["sliding_window"] = max(config.layer_windows)
        values["use_sliding_window"] = True
        values["layer_types"] = [
            "sliding_attention" if config.window(layer) else "full_attention" for layer in range(config.num_layers)
        ]
    return values


def _rope_values(scaling: RopeScaling) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = {"rope_type": scaling.kind} | {name: getattr(scaling, name) for name in names}
    if scaling.kind == "yarn":
        values |= {name: getattr(scaling, name) for name in ("attention_factor", "beta_fast", "beta_slow")}
    return values


def _tokenizer_values(model: LoadedModel) -> dict[str, Any]:
    texts = {"bos_token": model.config.bos_token_id, "eos_token": next(iter(model.config.eos_token_ids), None)}
    values: dict[str, Any] = {
        name: model.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        for name, token_id in texts.items()
        if token_id is not None
    }
    if model.chat_template is not None:
        values["chat_template"] = model.chat_template.source
    return values


def _write_weights(model: LoadedModel, directory: Path, progress: Progress) -> None:
    """One file, or shards with an index where there is more than SHARD_BYTES."""
    shards = list(_shards(model))
    total = sum(len(names) for names in shards)
    weight_map: dict[str, str] = {}
    done = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = _tensor(model, name)
            done += 1
            progress("converting", done / total)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(model: LoadedModel) -> Iterator[list[str]]:
    """The names of the program's tensors, in groups of up to SHARD_BYTES as float32."""
    names: list[str] = []
    size = 0
    for name in dict.fromkeys(name for weight in model.program.weights() for name in weight.names):
        added = 4 * int(np.prod(model.checkpoint.shape(name)))
        if names and size + added > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += added
    yield names


def _tensor(model: LoadedModel, name: str) -> NDArray[Any]:
    """A tensor as Hugging Face keeps it. Gemma's norms are stored there as w, with 1 + w meant; GGUF stores the sum."""
    raw = model.checkpoint.raw(name)
    if model.config.family == "gemma3" and name.endswith("norm.weight"):
        return np.ascontiguousarray(model.checkpoint.load(name) - np.float32(1.0))
    return np.ascontiguousarray(raw.data if raw.kind in PLAIN_KINDS else model.checkpoint.load(name))


def _check(model: LoadedModel, directory: Path) -> None:
    """Raises ModelError if what was written does not read as the same model."""
    written, meant = _comparable(load_model(directory).config), _comparable(model.config)
    if written != meant:
        raise ModelError(f"{model.path}: cannot be written as a Hugging Face directory: {written} is not {meant}")


def _comparable(config: ModelConfig) -> ModelConfig:
    """Without what the two formats say in different words."""
    return replace(config, norm_weight_offset=0.0, attention_scale=round(config.softmax_scale, 12))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
