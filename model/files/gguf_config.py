"""GGUF metadata as a ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..config import ModelConfig, RopeScaling
from ..errors import ModelError
from ..families.rope import llama3_divisors
from .gguf_file import GgufFile
from .rope_scaling import scaling_from_gguf

# GGUF architecture -> family. Mistral files say "llama".
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
# Gemma 3: every sixth layer sees everything, the others a window; GGUF has no key for it.
GEMMA3_WINDOW_PATTERN = 6
GEMMA3_LOCAL_THETA = 10000.0
GEMMA3_27B_LAYERS = 62  # the one size whose softmax scale is not 1 / sqrt(head_dim); GGUF has no key for that either
# Besides the one id that the metadata names, these texts end a turn or a document wherever a vocabulary has them.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def gguf_config(file: GgufFile) -> ModelConfig:
    """Raises ModelError for an architecture that is not supported and for missing metadata."""
    architecture = file.metadata.get("general.architecture")
    family = ARCHITECTURES.get(str(architecture))
    if family is None:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    get = _Reader(file, str(architecture))
    hidden, heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = get.integer("attention.key_length", hidden // heads)
    if get.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different width are not supported; use another model")
    layers = get.integer("block_count")
    theta, rotary_dim = get.number("rope.freq_base", 10000.0), get.integer("rope.dimension_count", head_dim)
    is_gemma = family == "gemma3"
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=get.integer("context_length"),
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, str(architecture), rotary_dim, theta),
        rotary_dim=rotary_dim,
        rope_local_theta=get.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA) if is_gemma else 0.0,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        attention_scale=(hidden / heads) ** -0.5 if is_gemma and layers == GEMMA3_27B_LAYERS else 0.0,
        activation="gelu_tanh" if is_gemma else "silu",
        layer_windows=_windows(get, layers) if is_gemma else (),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(file.metadata),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The named end-of-sequence and end-of-turn ids, then control tokens that are known to end a turn."""
    control, user_defined = 3, 4
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for token_id, text in enumerate(metadata.get("tokenizer.ggml.tokens", [])):
        if text in END_TOKENS and token_id < len(kinds) and kinds[token_id] in (control, user_defined):
            found.append(token_id)
    return tuple(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))


class _Reader:
    """Metadata of one architecture, checked where it is read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture

    def get(self, name: str) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{name}")

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, list):  # one value a layer; only uniform models are supported
            value = value[0] if len(set(value)) == 1 else None
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self._file.path}: metadata {self._architecture}.{name} is missing or not usable")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else len(file.metadata.get("tokenizer.ggml.tokens", []))


def _rope_scaling(file: GgufFile, architecture: str, head_dim: int, theta: float) -> RopeScaling:
    prefix = f"{architecture}.rope.scaling."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    tensor = file.tensors.get("rope_freqs.weight")
    divisors = None if tensor is None else file.data(tensor).view(np.float32).ravel()
    try:
        scaling = scaling_from_gguf(values, divisors)
    except (ValueError, KeyError) as error:
        raise ModelError(f"{file.path}: {error}; use another model") from error
    if divisors is not None and not np.allclose(divisors, llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
        raise ModelError(f"{file.path}: rope_freqs.weight is not Llama 3's scaling; use the Hugging Face directory")
    return scaling


def _windows(get: _Reader, layers: int) -> tuple[int, ...]:
    window = get.integer("attention.sliding_window")
    return tuple(0 if (layer + 1) % GEMMA3_WINDOW_PATTERN == 0 else window for layer in range(layers))
