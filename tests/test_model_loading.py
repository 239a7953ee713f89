"""Loading a model from either kind of file, and what is said when it cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from kvpool.model.errors import ModelError
from kvpool.model.loading import load_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_llama

HELLO = [{"role": "user", "content": "Hello"}]


def test_both_formats_load_the_same_model(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny-model")
    models = [load_model(directory), load_model(str(write_tiny_gguf(directory, tmp_path / "tiny.gguf")))]
    assert [model.name for model in models] == ["tiny-model", "tiny"]
    prompts = []
    for model in models:
        assert (model.tokenizer.bos_token_id, model.config.bos_token_id) == (1, 1)
        assert 2 in model.tokenizer.eos_token_ids
        assert model.tokenizer.eos_token_ids == model.config.eos_token_ids
        assert model.chat_template is not None
        prompts.append(model.tokenizer.encode(model.chat_template.render(HELLO), special=True))
        model.chat_template.close()
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == 1


def test_the_hash_is_of_the_files_and_nothing_else(tmp_path: Path) -> None:
    first = write_tiny_llama(tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    assert load_model(first).model_hash == load_model(second).model_hash
    tensors = load_file(second / "model.safetensors")
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, second / "model.safetensors")
    assert load_model(first).model_hash != load_model(second).model_hash
    assert len(load_model(first).model_hash) == 32


def test_a_template_file_goes_before_the_settings(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    settings = directory / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}chat"}]
    settings.write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<|im_start|>"}}))
    for expected, file in (("<|im_start|>chat", None), ("from the file", "from the file")):
        if file:
            (directory / "chat_template.jinja").write_text(file)
        template = load_model(directory).chat_template
        assert template is not None
        assert template.render(HELLO) == expected
        template.close()
    (directory / "chat_template.jinja").unlink()
    settings.unlink()
    assert load_model(directory).chat_template is None


def test_a_turn_ends_with_any_of_the_named_tokens(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path, eos_token_id=[0])
    assert load_model(directory).tokenizer.eos_token_ids == (0, 2)


def test_models_that_cannot_work_are_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return write_tiny_llama(tmp_path / name)

    directory = fresh("missing tensor")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing tensor: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(directory)

    directory = fresh("other shape")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 127}))
    with pytest.raises(ModelError, match=r"mlp\.gate_proj.*256 rows.*254"):
        load_model(directory)

    directory = fresh("small vocabulary")
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(ModelError):
        load_model(directory)

    for name, file in (
        ("no weights", "model.safetensors"),
        ("no tokenizer", "tokenizer.json"),
        ("no config", "config.json"),
    ):
        directory = fresh(name)
        (directory / file).unlink()
        with pytest.raises(ModelError, match=rf"{name}.*{file}"):
            load_model(directory)

    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(ModelError, match=r"notes\.txt"):
        load_model(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"nowhere\.gguf: no such file"):
        load_model(tmp_path / "nowhere.gguf")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "a", vocab_size=300)
    other = write_tiny_llama(tmp_path / "b")
    shutil.copy(other / "tokenizer.json", directory / "tokenizer.json")
    with pytest.raises(ModelError, match="tokenizer has 384 tokens, the model 300"):
        load_model(directory)
