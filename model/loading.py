"""Load a model, from whichever kind of file it is in."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .errors import ModelError
from .families import build_program
from .files.gguf_checkpoint import GgufCheckpoint
from .files.gguf_config import gguf_config
from .files.gguf_file import GgufFile
from .files.huggingface import SafetensorsCheckpoint, hugging_face_config, read_json, weight_files
from .files.pull import resolve
from .program import Program
from .text.chat_template import ChatTemplate
from .text.gguf_tokenizer import gguf_tokenizer
from .text.tokenizer import Tokenizer
from .weights import Checkpoint, check_weight


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything about one model except its weights' bytes, which `checkpoint` reads when asked."""

    name: str  # what people call it: the directory's or the file's name
    path: Path
    config: ModelConfig
    program: Program
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_hash: str  # 32 hex digits; the same files give the same hash, on any machine


def load_model(name_or_path: str | Path) -> LoadedModel:
    """From a Hugging Face directory, a .gguf file, or the name of a pulled model.

    Checks that every weight the model needs is there in the right shape, and reads none. Raises ModelError.
    """
    path = resolve(name_or_path)
    model = _from_directory(path) if path.is_dir() else _from_gguf(path)
    for weight in model.program.weights():
        check_weight(model.checkpoint, weight)
    if model.tokenizer.vocab_size > model.config.vocab_size:
        raise ModelError(
            f"{path}: the tokenizer has {model.tokenizer.vocab_size} tokens, the model {model.config.vocab_size}; "
            "they do not belong together"
        )
    return model


def _from_gguf(path: Path) -> LoadedModel:
    file = GgufFile(path)
    with ThreadPoolExecutor(1) as pool:  # hashing takes as long as the vocabulary, and does not need the interpreter
        hashing = pool.submit(_hash, [path])
        config = gguf_config(file)
        tokenizer = gguf_tokenizer(file)
    source = file.metadata.get("tokenizer.chat_template")
    return LoadedModel(
        name=path.stem,
        path=path,
        config=config,
        program=build_program(config),
        checkpoint=GgufCheckpoint(file, config),
        tokenizer=tokenizer,
        chat_template=_chat_template(source, tokenizer, config.bos_token_id, next(iter(config.eos_token_ids), None)),
        model_hash=hashing.result(),
    )


def _from_directory(path: Path) -> LoadedModel:
    config = hugging_face_config(path)
    checkpoint = SafetensorsCheckpoint(path)
    if not config.tie_word_embeddings and "lm_head.weight" not in checkpoint.names():
        config = replace(config, tie_word_embeddings=True)
    settings_file = path / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    tokenizer = Tokenizer.from_file(path / "tokenizer.json")
    bos, eos = (tokenizer.token_to_id(_token_text(settings.get(f"{which}_token"))) for which in ("bos", "eos"))
    # Chat models often end a turn with a token that only their tokenizer names.
    end_ids = tuple(dict.fromkeys([*config.eos_token_ids, *([] if eos is None else [eos])]))
    config = replace(config, bos_token_id=config.bos_token_id if bos is None else bos, eos_token_ids=end_ids)
    tokenizer.bos_token_id, tokenizer.eos_token_ids = config.bos_token_id, end_ids
    return LoadedModel(
        name=path.resolve().name,
        path=path,
        config=config,
        program=build_program(config),
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        chat_template=_chat_template(_template_source(path, settings), tokenizer, bos, eos),
        model_hash=_hash([path / "config.json", path / "tokenizer.json", *weight_files(path)]),
    )


def _token_text(token: Any) -> str:
    """tokenizer_config.json writes a token as text or as an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or tokenizer_config.json's: one text, or named ones of which "default" is the chat's."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _chat_template(source: str | None, tokenizer: Tokenizer, bos: int | None, eos: int | None) -> ChatTemplate | None:
    if not source:
        return None
    bos_token, eos_token = (
        "" if token_id is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        for token_id in (bos, eos)
    )
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


HASHED_WHOLE_BYTES = 1 << 30
SAMPLE_BYTES, SAMPLE_STRIDE = 1 << 16, 1 << 20


def _hash(paths: list[Path]) -> str:
    """Of each file its length and its bytes; of files over 1 GiB only the first 64 KiB of every MiB.

    Hashing tens of gigabytes would double the time a start takes. A model trained differently differs in nearly every
    matrix, so the samples tell it apart; a copy with a few flipped bytes in between is not what this hash is for.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        size = os.path.getsize(path)
        sampled = size > HASHED_WHOLE_BYTES
        digest.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            for begin in range(0, size, SAMPLE_STRIDE):
                file.seek(begin)
                digest.update(file.read(SAMPLE_BYTES if sampled else SAMPLE_STRIDE))
    return digest.hexdigest()
