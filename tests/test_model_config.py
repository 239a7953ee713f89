"""config.json, in the spellings of several generations, as a ModelConfig."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvpool.model.config import ModelConfig, RopeScaling
from kvpool.model.errors import ModelError
from kvpool.model.files.huggingface import hugging_face_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def read(directory: Path, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    return hugging_face_config(directory)


def test_what_a_minimal_file_means(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim) == (4, 16, 16)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10000.0, RopeScaling(), False)
    assert (config.activation, config.layer_windows, config.eos_token_ids) == ("silu", (), ())


def test_rope_of_both_generations_is_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    old = read(tmp_path, rope_theta=500000.0, rope_scaling=scaling)
    new = read(tmp_path, rope_parameters=scaling | {"rope_theta": 500000.0})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def test_yarn_has_its_temperature(tmp_path: Path) -> None:
    plain = read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert plain.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert plain.rope_scaling.original_max_position_embeddings == 512
    given = read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 1.5})
    assert given.rope_scaling.attention_factor == 1.5
    assert given.rope_scaling.original_max_position_embeddings == 2048


def test_unknown_values_are_refused_with_the_file_and_what_is_known(tmp_path: Path) -> None:
    for changes, words in (
        ({"model_type": "mamba"}, r"config\.json: model_type 'mamba'.*llama"),
        ({"hidden_act": "relu"}, r"config\.json: hidden_act 'relu'.*silu"),
        ({"rope_scaling": {"type": "spiral", "factor": 2}}, r"config\.json: rope scaling 'spiral'.*yarn"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config.*GGUF"),
        ({"hidden_size": None}, r"config\.json"),
    ):
        with pytest.raises(ModelError, match=words):
            read(tmp_path, **changes)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"config\.json: .*is missing"):
        hugging_face_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        hugging_face_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
        hugging_face_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        hugging_face_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 16}, ()),
        ({"model_type": "mistral", "sliding_window": 16}, (16, 16, 16, 16)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "qwen2", "sliding_window": 16}, ()),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0}, ()),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 16),
        ),
        ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2}, (16, 0, 16, 0)),
        ({"model_type": "gemma3_text", "sliding_window": 16}, (16, 16, 16, 16)),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 16,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 16, 0, 16),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    assert read(tmp_path, **changes).layer_windows == windows


def test_gemma_inside_a_multimodal_file(tmp_path: Path) -> None:
    text = {name: value for name, value in BASE.items() if name != "model_type"}
    text |= {"sliding_window": 16, "query_pre_attn_scalar": 144, "head_dim": 32}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    )
    config = hugging_face_config(tmp_path)
    assert (config.family, config.head_dim, config.attention_scale) == ("gemma3", 32, 1 / 12)
    assert (config.embedding_scale, config.norm_weight_offset) == (8.0, 1.0)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 1e4)
    assert (config.tie_word_embeddings, config.qk_norm, config.activation) == (True, True, "gelu_tanh")
    assert config.eos_token_ids == (1, 106)


def test_biases_and_norms_by_family(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="qwen2").attention_bias
    assert not read(tmp_path, model_type="qwen3").attention_bias
    assert read(tmp_path, model_type="qwen3").qk_norm
    assert read(tmp_path, attention_bias=True).attention_bias


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 7)
