"""The tiny model as a GGUF file: llama.cpp's names, row order and norms, written by the gguf library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_tiny_gguf(
    directory: Path, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Convert a directory that `write_tiny_model` wrote into the file `path`; matrices become `kind`, vectors stay."""
    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config, architecture)
    _write_tokenizer(writer, directory)
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored = _stored(name, tensor, config, architecture)
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name, architecture), stored)
        else:
            blocks = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name, architecture), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, architecture: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    names = _NAMES | _GEMMA_NAMES if architecture == "gemma3" else _NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def _stored(name: str, tensor: np.ndarray, config: dict[str, Any], architecture: str) -> np.ndarray:
    if architecture == "gemma3" and "norm" in name:
        return tensor + np.float32(1.0)
    if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return llama_order(tensor, heads)


def llama_order(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Pairs (i, i + head_dim / 2) of each head become neighbours (2 i, 2 i + 1), row by row."""
    head_dim = len(tensor) // heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(tensor[order])


def _write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])
