"""The weights of a decoder by their Hugging Face tensor names, as every family below spells them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ModelConfig
from ..program import Weight

EMBEDDING = "model.embed_tokens.weight"


def embedding(config: ModelConfig) -> Weight:
    return Weight((EMBEDDING,), config.vocab_size, config.hidden_size)


def output(config: ModelConfig) -> Weight:
    """The vocabulary product; with tied embeddings it is the embedding table itself."""
    if config.tie_word_embeddings:
        return embedding(config)
    return Weight(("lm_head.weight",), config.vocab_size, config.hidden_size)


def final_norm(config: ModelConfig) -> Weight:
    return Weight(("model.norm.weight",), config.hidden_size, offset=config.norm_weight_offset)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights; q, k and v are one stacked matrix, and so are gate and up."""

    config: ModelConfig
    layer: int

    def norm(self, name: str) -> Weight:
        """(hidden_size,)"""
        return Weight((self._name(f"{name}.weight"),), self.config.hidden_size, offset=self.config.norm_weight_offset)

    def head_norm(self, name: str) -> Weight | None:
        """(head_dim,), or None where the model does not normalise its queries and keys."""
        if not self.config.qk_norm:
            return None
        name = self._name(f"self_attn.{name}.weight")
        return Weight((name,), self.config.head_dim, offset=self.config.norm_weight_offset)

    def qkv(self) -> Weight:
        """((num_heads + 2 num_kv_heads) * head_dim, hidden_size)"""
        return Weight(self._names("self_attn", "qkv", "weight"), qkv_width(self.config), self.config.hidden_size)

    def qkv_bias(self) -> Weight | None:
        if not self.config.attention_bias:
            return None
        return Weight(self._names("self_attn", "qkv", "bias"), qkv_width(self.config))

    def o(self) -> Weight:
        """(hidden_size, num_heads * head_dim)"""
        config = self.config
        return Weight(self._names("self_attn", "o", "weight"), config.hidden_size, config.num_heads * config.head_dim)

    def o_bias(self) -> Weight | None:
        """(hidden_size,); Llama's `attention_bias` covers the output projection too, Qwen2's does not."""
        if not self.config.attention_bias or self.config.family == "qwen2":
            return None
        return Weight(self._names("self_attn", "o", "bias"), self.config.hidden_size)

    def gate_up(self) -> Weight:
        """(2 intermediate_size, hidden_size)"""
        names = (self._name("mlp.gate_proj.weight"), self._name("mlp.up_proj.weight"))
        return Weight(names, 2 * self.config.intermediate_size, self.config.hidden_size)

    def gate_up_bias(self) -> Weight | None:
        if not self.config.mlp_bias:
            return None
        names = (self._name("mlp.gate_proj.bias"), self._name("mlp.up_proj.bias"))
        return Weight(names, 2 * self.config.intermediate_size)

    def down(self) -> Weight:
        """(hidden_size, intermediate_size)"""
        return Weight((self._name("mlp.down_proj.weight"),), self.config.hidden_size, self.config.intermediate_size)

    def down_bias(self) -> Weight | None:
        return Weight((self._name("mlp.down_proj.bias"),), self.config.hidden_size) if self.config.mlp_bias else None

    def _name(self, suffix: str) -> str:
        return f"model.layers.{self.layer}.{suffix}"

    def _names(self, part: str, letters: str, kind: str) -> tuple[str, ...]:
        return tuple(self._name(f"{part}.{letter}_proj.{kind}") for letter in letters)


def qkv_width(config: ModelConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
