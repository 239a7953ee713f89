"""Weights come out the same whichever file they were in, and damaged files are refused by name."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpool.model.errors import ModelError
from kvpool.model.files.gguf_checkpoint import GgufCheckpoint
from kvpool.model.files.gguf_config import gguf_config
from kvpool.model.files.gguf_file import GgufFile
from kvpool.model.files.huggingface import SafetensorsCheckpoint
from kvpool.model.files.safetensors_file import SafetensorsFile
from kvpool.model.loading import load_model
from kvpool.model.program import Weight
from kvpool.model.weights import load_weight
from tests.support.tiny_gguf import gguf_name, llama_order, write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama, write_tiny_model

Q = gguf.GGMLQuantizationType
Q_PROJ, K_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_gguf_gives_the_weights_and_the_numbers_of_the_directory(model_type: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "hf", model_type, num_hidden_layers=6, sliding_window=24, layer_types=None)
    ours, theirs = load_model(directory), load_model(write_tiny_gguf(directory, tmp_path / "tiny.gguf"))
    for weight, other in zip(ours.program.weights(), theirs.program.weights(), strict=True):
        assert weight.names == other.names
        # Gemma's GGUF has 1 added in float32 already; elsewhere nothing was added, so nothing may differ.
        np.testing.assert_array_equal(load_weight(ours.checkpoint, weight), load_weight(theirs.checkpoint, other))
    told_by_directory_alone = {"gemma3_text": {"norm_weight_offset": 0.0, "attention_scale": 0.0}}
    told_by_directory_alone["mistral"] = {"family": "llama", "layer_windows": ()}
    expected = replace(ours.config, **told_by_directory_alone.get(model_type, {}))
    assert theirs.config.eos_token_ids == (2, 0)  # the named one, and <|endoftext|>
    same = {"rms_norm_eps": 1e-5, "eos_token_ids": (2,)}
    assert replace(theirs.config, **same) == replace(expected, **same)
    assert theirs.config.rms_norm_eps == pytest.approx(1e-5)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0])
def test_quantised_rows_come_raw_and_dequantised_in_hugging_face_order(kind: Any, tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "hf")
    checkpoint = load_model(write_tiny_gguf(directory, tmp_path / "tiny.gguf", kind)).checkpoint
    original = load_file(directory / "model.safetensors")[Q_PROJ]
    blocks = gguf.quants.quantize(original, kind)  # every row is quantised by itself, so order does not change values
    raw = checkpoint.raw(Q_PROJ)
    assert (raw.kind, raw.shape) == (kind.name, original.shape)
    np.testing.assert_array_equal(raw.data.view(np.uint8).reshape(64, -1), blocks.view(np.uint8).reshape(64, -1))
    np.testing.assert_array_equal(checkpoint.load(Q_PROJ), gguf.quants.dequantize(blocks, kind).reshape(64, 64))


def test_raw_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "hf")
    path = write_tiny_gguf(directory, tmp_path / "tiny.gguf", Q.Q8_0)
    for checkpoint in (SafetensorsCheckpoint(directory), load_model(path).checkpoint):
        raw = checkpoint.raw("model.layers.0.mlp.down_proj.weight").data
        assert not raw.flags.owndata
        assert not raw.flags.writeable


def test_stored_dtypes_are_kept_raw_and_widened_when_loaded(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    half = values.astype(np.float16)
    brain = values.astype(ml_dtypes.bfloat16)
    _write_safetensors(tmp_path / "model.safetensors", {"half": ("F16", half), "brain": ("BF16", brain)})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, stored in (("half", half), ("brain", brain)):
        assert checkpoint.raw(name).data.dtype == stored.dtype
        np.testing.assert_array_equal(checkpoint.load(name), stored.astype(np.float32))
        assert checkpoint.load(name).dtype == np.float32


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    whole = load_file(directory / "model.safetensors")
    expected = load_model(directory)
    weights = [load_weight(expected.checkpoint, weight) for weight in expected.program.weights()]
    (directory / "model.safetensors").unlink()
    names = sorted(whole)
    shards = {f"model-0000{part + 1}-of-00003.safetensors": names[part::3] for part in range(3)}
    for file, held in shards.items():
        save_file({name: whole[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sharded = load_model(directory)
    for weight, array in zip(sharded.program.weights(), weights, strict=True):
        np.testing.assert_array_equal(load_weight(sharded.checkpoint, weight), array)

    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors"):
        load_model(directory)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/model.safetensors"}}))
    with pytest.raises(ModelError, match="fetch the model again"):
        load_model(directory)


def test_multimodal_names_lose_their_prefix(tmp_path: Path) -> None:
    values = {"language_model.model.norm.weight": np.ones(4, np.float32), "vision_tower.x": np.ones(1, np.float32)}
    save_file(values, tmp_path / "model.safetensors")
    assert "model.norm.weight" in SafetensorsCheckpoint(tmp_path).names()


def test_stacking_and_offset(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    checkpoint, stored = SafetensorsCheckpoint(directory), load_file(directory / "model.safetensors")
    stacked = load_weight(checkpoint, Weight((Q_PROJ, K_PROJ), 96, 64, offset=0.5))
    np.testing.assert_array_equal(stacked, np.concatenate([stored[Q_PROJ], stored[K_PROJ]]) + np.float32(0.5))
    assert load_weight(checkpoint, Weight(("model.norm.weight",), 64)).shape == (64, 1)
    with pytest.raises(ModelError, match=r"k_proj.*96 rows.*97"):
        load_weight(checkpoint, Weight((Q_PROJ, K_PROJ), 97, 64))
    with pytest.raises(ModelError, match="columns"):
        load_weight(checkpoint, Weight((Q_PROJ,), 64, 63))
    with pytest.raises(ModelError, match=r"model\.nothing is missing"):
        load_weight(checkpoint, Weight(("model.nothing",), 1))


def test_a_missing_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    stored = load_file(directory / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, directory / "model.safetensors")
    assert load_model(directory).config.tie_word_embeddings


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


_GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "entry",
    [
        {**_GOOD, "data_offsets": [0, 32]},
        {**_GOOD, "data_offsets": [16, 0]},
        {**_GOOD, "data_offsets": [-16, 0]},
        {**_GOOD, "shape": [2, 3]},
        {**_GOOD, "shape": [-2, -2]},
        {**_GOOD, "shape": [2.0, 2]},
        {"dtype": "F32", "shape": [2, 2]},
        [1, 2],
        None,
    ],
)
def test_hostile_safetensors_headers_are_refused(entry: Any, tmp_path: Path) -> None:
    text = json.dumps({"t": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged header"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 1000])
def test_truncated_files_are_refused(length: int, tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "hf")
    for path, read in (
        (directory / "model.safetensors", SafetensorsFile),
        (write_tiny_gguf(directory, tmp_path / "tiny.gguf"), GgufFile),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=path.name):
            read(path)
        path.write_bytes(whole[:-1])
        with pytest.raises(ModelError, match=path.name):
            read(path)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"GGML"), (4, struct.pack("<I", 9)), (8, struct.pack("<Q", 2**60)), (16, struct.pack("<Q", 2**60))],
)
def test_hostile_gguf_headers_are_refused(at: int, value: bytes, tmp_path: Path) -> None:
    path = write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        GgufFile(path)


def test_flipped_bytes_in_gguf_metadata_raise_nothing_but_model_error(tmp_path: Path) -> None:
    path = write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for position in random.integers(0, 6000, 150):
        data = bytearray(whole)
        data[position] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        try:
            file = GgufFile(path)
            GgufCheckpoint(file, gguf_config(file))
        except ModelError:
            continue


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"other\.gguf: architecture 'mamba'.*llama"):
        load_model(tmp_path / "other.gguf")


def test_llama_three_frequency_divisors_become_its_scaling(tmp_path: Path) -> None:
    file = GgufFile(write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", file.metadata[f"llama.{key}"])
    writer.add_head_count(4)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_freq_base(500000.0)
    frequencies = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 8192 * frequencies / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    values = (1 / ((1 - kept) / 32 + kept)).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scaling = gguf_config(GgufFile(tmp_path / "scaled.gguf")).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 32.0, 8192)


def test_the_helpers_invert_what_the_checkpoint_undoes() -> None:
    rows = np.arange(8)[:, None]
    assert llama_order(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_name("model.layers.3.mlp.up_proj.weight", "llama") == "blk.3.ffn_up.weight"
