"""A real, very small Hugging Face model directory with random weights, written in well under a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """
The sea is never the same twice. In the morning it is grey and still; by noon the wind has come round to the south,
and every wave carries its own small light. The harbour master writes the names of the boats in a long book: which
came in, which went out, what they carried, and when they said they would be back. Children count the gulls on the
wall, one, two, three, four, and lose count and begin again. "Where does the water go?" asks the smallest. "Out,"
says her brother, "and then in." Nobody has ever given a better answer. At night the lamp at the end of the pier
turns slowly, and the boats that are still out there look for it, and find it, and come home. What is the capital of
France? Why is the sky blue? The quick brown fox jumps over the lazy dog, and the other animals only watch and
wonder how this came to be. A list of numbers: 10, 20, 30, 100, 200, 300, 1000, 2000; and of colours: red, green,
blue, yellow, white and black.
"""

_DEFAULTS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


# What config.json of another family says besides the defaults above.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": False, "attention_bias": True},
    "qwen3": {},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}


def write_tiny_llama(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """`write_tiny_model` of the Llama family."""
    return write_tiny_model(directory, "llama", seed=seed, **overrides)


def write_tiny_model(directory: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `directory`; return it.

    `overrides` are keys of config.json (`num_hidden_layers=4`, `tie_word_embeddings=True`, ...). Weights are float32,
    scaled so that greedy decoding wanders instead of repeating one token. Same arguments, same bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = _DEFAULTS | {"model_type": model_type} | _FAMILIES[model_type] | overrides
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_random_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    build_tiny_tokenizer(min(config["vocab_size"], 384)).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return directory


def build_tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """Byte-level BPE trained on a page of text: ids 0 to 2 are special, then 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    # SmolLM's way of cutting words, so that a GGUF copy can name it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_gemma = config["model_type"] == "gemma3_text"
    norm_mean = 0.0 if is_gemma else 1.0  # Gemma stores w with 1 + w meant

    def matrix(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return random.normal(0.0, gain / np.sqrt(cols), (rows, cols)).astype(np.float32)

    def vector(size: int, mean: float = norm_mean) -> np.ndarray:
        return random.normal(mean, 0.1, size).astype(np.float32)

    embedding_std = 0.4 if config["tie_word_embeddings"] else 1.0
    tensors = {
        "model.embed_tokens.weight": random.normal(0.0, embedding_std, (config["vocab_size"], hidden)).astype(
            np.float32
        ),
        "model.norm.weight": vector(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, gain=3.0)
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (q_rows, hidden, 2.0),
            "self_attn.k_proj": (kv_rows, hidden, 2.0),
            "self_attn.v_proj": (kv_rows, hidden, 2.0),
            "self_attn.o_proj": (hidden, q_rows, 2.0),
            "mlp.gate_proj": (ffn, hidden, 2.0),
            "mlp.up_proj": (ffn, hidden, 1.0),
            "mlp.down_proj": (hidden, ffn, 1.0),
        }
        biased = {name for name in linears if config["attention_bias" if name.startswith("self") else "mlp_bias"]}
        if config["model_type"] == "qwen2":
            biased.discard("self_attn.o_proj")
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if is_gemma:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if is_gemma or config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        prefix = f"model.layers.{layer}"
        for name, (rows, cols, gain) in linears.items():
            tensors[f"{prefix}.{name}.weight"] = matrix(rows, cols, gain)
            if name in biased:
                tensors[f"{prefix}.{name}.bias"] = vector(rows, mean=0.0)
        tensors |= {f"{prefix}.{name}.weight": vector(size) for name, size in norms.items()}
    return tensors
