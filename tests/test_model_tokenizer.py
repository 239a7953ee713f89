"""Tokenizers: both file formats agree, ids equal the reference's, and text goes in and out whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.model.errors import ModelError
from kvpool.model.files.gguf_file import GgufFile
from kvpool.model.text.gguf_tokenizer import gguf_tokenizer
from kvpool.model.text.pre_tokenizers import PATTERNS
from kvpool.model.text.tokenizer import Tokenizer
from tests.support.gold import gold_cases, pulled_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import SPECIAL_TOKENS, write_tiny_llama
from tests.support.tiny_sentencepiece import (
    MARK,
    best_unigram_score,
    slow_bpe,
    write_sentencepiece_gguf,
)

LETTERS = [(MARK, -50.0), ("a", -51.0), ("b", -52.0), ("c", -53.0), ("é", -54.0)]
PIECES = [
    *LETTERS,
    *(
        (piece, -1.0 - rank)
        for rank, piece in enumerate(["ab", "ba", "abc", f"{MARK}a", "aa", "aaa", "bab", "cab", f"{MARK}{MARK}"])
    ),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny_llama(tmp_path_factory.mktemp("tiny")) / "tokenizer.json")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    return gguf_tokenizer(GgufFile(write_sentencepiece_gguf(path, PIECES)))


@given(text=st.text(max_size=40))
def test_byte_level_text_goes_in_and_out_whole(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, special=False)
    assert tiny.decode(ids) == text
    assert b"".join(map(tiny.token_bytes, ids)) == text.encode()


@given(text=st.text(st.sampled_from(" abcé!\n\t🦙日"), max_size=30))
def test_sentencepiece_text_goes_in_and_out_whole(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text, special=False)) == text


@given(text=st.text(st.sampled_from(" abcé!\n\t🦙日"), max_size=30))
def test_text_that_follows_other_text_gets_nothing_put_before_it(
    tiny: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for tokenizer in (tiny, sentencepiece):
        before = tokenizer.encode("ab", special=False)
        ids = tokenizer.encode(text, special=False, add_bos=False, continuing=True)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.encode("ab", special=False) == before


def test_gguf_and_directory_give_the_same_ids(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "hf")
    ours = Tokenizer.from_file(directory / "tokenizer.json")
    theirs = gguf_tokenizer(GgufFile(write_tiny_gguf(directory, tmp_path / "tiny.gguf")))
    assert ours.vocab_size == theirs.vocab_size == 384
    for text in ("The sea is never the same twice.", "In 1999, 20 boats!", " a  b\n\n c", "ünï 🦙", "<|im_end|>", ""):
        for special in (True, False):
            assert ours.encode(text, special=special) == theirs.encode(text, special=special)
    assert [ours.token_bytes(i) for i in range(384)] == [theirs.token_bytes(i) for i in range(384)]


def test_special_tokens_are_read_only_where_they_are_trusted(tiny: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    trusted, typed = tiny.encode(text, special=True), tiny.encode(text, special=False)
    assert (trusted[0], trusted[-1]) == (1, 2)
    assert not {0, 1, 2} & set(typed)
    assert tiny.decode(trusted) == "user\nhi"
    assert tiny.decode(typed) == text
    assert tiny.encode(text, special=True) == trusted, "the setting must not stick"


def test_token_bytes_and_ids_outside_the_vocabulary(tiny: Tokenizer) -> None:
    assert [tiny.token_bytes(token_id) for token_id in range(3)] == [token.encode() for token in SPECIAL_TOKENS]
    assert [tiny.is_special(token_id) for token_id in (0, 2, 3)] == [True, True, False]
    assert {tiny.token_bytes(token_id) for token_id in range(3, 259)} == {bytes([byte]) for byte in range(256)}
    for token_id in (384, 10**6, 2**32, 2**64, -1):
        assert tiny.token_bytes(token_id) == b""
    assert tiny.decode([384, 2**40]) == ""


@given(text=st.text(st.sampled_from(" abcé🦙"), max_size=24))
@settings(max_examples=300)
def test_score_driven_merges_equal_the_slow_way(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, special=False, add_bos=False)
    marked = (" " + text if text else "").replace(" ", MARK)
    pieces = [sentencepiece._inner.id_to_token(token_id) for token_id in ids]
    assert pieces == slow_bpe(marked, PIECES)


@given(
    data=st.data(),
    scores=st.lists(st.integers(-60, -1), min_size=len(PIECES), max_size=len(PIECES), unique=True),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merges_follow_any_scores(tmp_path: Path, data: st.DataObject, scores: list[int]) -> None:
    pieces = [(piece, float(score)) for (piece, _), score in zip(PIECES, scores, strict=True)]
    tokenizer = gguf_tokenizer(GgufFile(write_sentencepiece_gguf(tmp_path / "v.gguf", pieces, add_space_prefix=False)))
    for _ in range(5):
        text = data.draw(st.text("ab c", max_size=14))
        ids = tokenizer.encode(text, special=False, add_bos=False)
        assert [tokenizer._inner.id_to_token(i) for i in ids] == slow_bpe(text.replace(" ", MARK), pieces)


def test_sentencepiece_adds_its_marker_and_user_defined_tokens_stand_apart(tmp_path: Path) -> None:
    path = write_sentencepiece_gguf(tmp_path / "v.gguf", PIECES, user_defined=["<tool>"], add_space_prefix=False)
    tokenizer = gguf_tokenizer(GgufFile(path))
    tool = 3 + 256
    assert tokenizer.encode("<s>", special=True) == [1]
    assert tokenizer.encode("<tool>", special=False) == [1, tool]
    assert tokenizer.encode("<tool>", special=False, add_bos=False) == [tool]
    assert 1 not in tokenizer.encode("<s>", special=False, add_bos=False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.decode([1, tool, 2]) == "<tool>"
    without = write_sentencepiece_gguf(tmp_path / "w.gguf", PIECES, add_bos_token=False, add_eos_token=True)
    assert gguf_tokenizer(GgufFile(without)).encode("", special=False) == [2]


def test_a_space_before_the_first_word_belongs_to_the_tokenizer_only_at_the_start(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ab", special=False, add_bos=False)
    assert sentencepiece.decode(ids) == "ab"
    assert sentencepiece.decode(ids, continuing=True) == " ab"
    assert sentencepiece.decode([1, *ids]) == "ab"


@given(text=st.text("abc ", max_size=20))
def test_unigram_finds_the_best_split(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "unigram.gguf"
    if not path.exists():
        write_sentencepiece_gguf(path, PIECES, model="t5", add_space_prefix=False)
    tokenizer = gguf_tokenizer(GgufFile(path))
    ids = tokenizer.encode(text, special=False, add_bos=False)
    scores = dict(PIECES)
    got = sum(scores[tokenizer._inner.id_to_token(token_id)] for token_id in ids)
    assert got == pytest.approx(best_unigram_score(text.replace(" ", MARK), scores))
    assert tokenizer.decode(ids) == text


def test_a_million_characters_take_no_more_than_seconds(sentencepiece: Tokenizer, tiny: Tokenizer) -> None:
    for tokenizer in (sentencepiece, tiny):
        assert len(tokenizer.encode("ab ca" * 40_000, special=False)) > 40_000


@pytest.mark.parametrize("kind", sorted(PATTERNS))
def test_every_pre_tokenizer_kind_compiles_and_keeps_the_text(kind: str, tmp_path: Path) -> None:
    file = GgufFile(write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf"))
    file.metadata["tokenizer.ggml.pre"] = kind
    text = "Hello, y'all! I'VE 12345 things,\r\n\n  日本語 naïve ΣΊΣΥΦΟΣ x=3.14\t\U0001f999"
    tokenizer = gguf_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt-2", ["I", "'ve", " 123", " things", ",", "\n\n", " ok"]),
        ("smollm", ["I", "'ve", " ", "1", "2", "3", " things", ",", "\n\n", " ok"]),
        ("llama-bpe", ["I", "'ve", " ", "123", " things", ",\n\n", " ok"]),
        ("qwen2", ["I", "'ve", " ", "1", "2", "3", " things", ",\n\n", " ok"]),
        ("tekken", ["I", "'ve", " ", "1", "2", "3", " things", ",\n\n", " ok"]),
        ("gpt-4o", ["I've", " ", "123", " things", ",\n\n", " ok"]),
    ],
)
def test_where_each_kind_cuts(kind: str, words: list[str], tmp_path: Path) -> None:
    file = GgufFile(write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf"))
    file.metadata["tokenizer.ggml.pre"] = kind
    text = "I've 123 things,\n\n ok"
    pieces = gguf_tokenizer(file)._inner.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_unusable_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(write_tiny_llama(tmp_path / "hf"), tmp_path / "tiny.gguf")
    for key, value, words in (
        ("tokenizer.ggml.pre", "martian", "'martian'.*llama-bpe"),
        ("tokenizer.ggml.model", "bert", "'bert'.*gpt2"),
        ("tokenizer.ggml.tokens", None, "no vocabulary"),
        ("tokenizer.ggml.token_type", [1], "token_type"),
        ("tokenizer.ggml.merges", ["zz qq"], "damaged tokenizer"),
    ):
        file = GgufFile(path)
        file.metadata[key] = value
        with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{words}"):
            gguf_tokenizer(file)
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be used"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be used"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_texts_have_the_reference_ids(name: str) -> None:
    model = pulled_model(name)
    for case in gold_cases(name):
        if case["kind"] == "raw":
            assert model.tokenizer.encode(case["text"], special=False) == case["prompt_ids"]
        if case["kind"] == "chat":
            assert model.chat_template is not None
            prompt = model.chat_template.render([{"role": "user", "content": case["text"]}])
            assert model.tokenizer.encode(prompt, special=True) == case["prompt_ids"]
