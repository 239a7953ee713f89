"""What a decoder-only transformer is, in numbers: one frozen record that every family reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. `kind`: none | linear | llama3 | yarn."""

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one model. Names follow Hugging Face's `config.json`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rotary_dim: int = 0  # 0: all of head_dim
    rope_local_theta: float = 0.0  # theta of sliding-window layers; 0: the same as rope_theta
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_weight_offset: float = 0.0  # 1.0 where the checkpoint stores w with (1 + w) meant
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    activation: str = "silu"  # silu | gelu_tanh
    layer_windows: tuple[int, ...] = ()  # tokens a layer may look back, itself included; 0 or missing: everything
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int:
        return self.layer_windows[layer] if layer < len(self.layer_windows) else 0

    def kv_values_per_token(self) -> int:
        """Numbers that one token stores in the pool, K and V of all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
