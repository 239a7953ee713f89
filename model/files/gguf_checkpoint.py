"""A GGUF file's tensors under their Hugging Face names, with llama.cpp's row order undone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import ModelError
from ..weights import Float32, RawTensor
from .gguf_file import GgufFile, GgufTensor

WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has four norms a layer: what GGUF calls ffn_norm comes before the feed-forward block there.
GEMMA_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
}


class GgufCheckpoint:
    """Fulfils `weights.Checkpoint` over a GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.file = file
        self._config = config
        self._tensors = {hugging_face_name(name, config.family): tensor for name, tensor in file.tensors.items()}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def raw(self, name: str) -> RawTensor:
        tensor = self._find(name)
        data: NDArray[Any] = self.file.data(tensor)
        if tensor.kind in PLAIN:
            data = data.view(PLAIN[tensor.kind]).reshape(tensor.shape)
        return RawTensor(tensor.kind.name, tensor.shape, self._rows_in_order(tensor, data))

    def load(self, name: str) -> Float32:
        raw = self.raw(name)
        kind = GGMLQuantizationType[raw.kind]
        if kind in PLAIN:
            return raw.data.astype(np.float32, copy=False)
        try:
            values: Float32 = dequantize(raw.data, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.file.path}: tensor {name} is {raw.kind}, which cannot be dequantised; "
                "use a file with Q8_0, Q6_K, Q5_K, Q4_K, Q4_0, Q4_1, Q5_0, Q5_1, F16 or BF16"
            ) from error
        return values.reshape(raw.shape)

    def _find(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.file.path}: tensor {name} is missing; the file does not hold a whole model")
        return tensor

    def _rows_in_order(self, tensor: GgufTensor, data: NDArray[Any]) -> NDArray[Any]:
        """Undo the q and k row order of GGUF's "llama" architecture, which rotates neighbours (2i, 2i + 1).

        Within a head, stored row 2 i + h is row h * head_dim / 2 + i here (pairs by halves). Whole rows move, so
        quantised blocks stay intact.
        """
        rotated = ROTATED.fullmatch(tensor.name)
        if rotated is None or self.file.metadata.get("general.architecture") != "llama":
            return data
        heads = self._config.num_heads if rotated[1] == "q" else self._config.num_kv_heads
        pairs = data.reshape(heads, len(data) // heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(data.shape)


def hugging_face_name(name: str, family: str) -> str:
    """The canonical name of a GGUF tensor; names this table does not know stay as they are (nothing asks for them)."""
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE_MODEL:
        return f"{WHOLE_MODEL[stem]}.{kind}"
    found = LAYER_TENSOR.fullmatch(name)
    table = IN_LAYER | GEMMA_NORMS if family.startswith("gemma") else IN_LAYER
    if found is None or found[2] not in table:
        return name
    return f"model.layers.{found[1]}.{table[found[2]]}.{found[3]}"
