"""Streamed text: deltas add up to the whole, characters stay whole, stop strings never leak."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.model.files.gguf_file import GgufFile
from kvpool.model.text.detokenizer import StopStrings, StreamDetokenizer
from kvpool.model.text.gguf_tokenizer import gguf_tokenizer
from kvpool.model.text.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_llama
from tests.support.tiny_sentencepiece import MARK, write_sentencepiece_gguf

PIECES = [(MARK, -9.0), ("a", -8.0), ("b", -7.0), (f"{MARK}a", -1.0), ("日", -2.0)]
VOCABULARIES = ("byte-level", "sentencepiece")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory: Path = tmp_path_factory.mktemp("tokenizers")
    sentencepiece = write_sentencepiece_gguf(directory / "spm.gguf", PIECES)
    return {
        "byte-level": Tokenizer.from_file(write_tiny_llama(directory) / "tokenizer.json"),
        "sentencepiece": gguf_tokenizer(GgufFile(sentencepiece)),
    }


def stream(tokenizer: Tokenizer, ids: list[int], *, continuing: bool = False) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, continuing=continuing)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(ids=st.lists(st.integers(0, 400), max_size=40), continuing=st.booleans())
@settings(max_examples=300)
def test_deltas_of_any_ids_add_up_to_the_whole(
    tokenizers: dict[str, Tokenizer], kind: str, ids: list[int], continuing: bool
) -> None:
    tokenizer = tokenizers[kind]
    deltas = stream(tokenizer, ids, continuing=continuing)
    assert "".join(deltas) == tokenizer.decode(ids, continuing=continuing)


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=MARK), max_size=20))
def test_no_delta_has_half_a_character(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]  # SentencePiece cannot tell its own mark from a space: the text has none
    deltas = stream(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_appears_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    byte_tokens = [3 + byte for byte in "🦙".encode()]
    assert stream(tokenizers["sentencepiece"], byte_tokens) == ["", "", "", "🦙", ""]
    assert stream(tokenizers["sentencepiece"], byte_tokens[:3]) == ["", "", "", "\ufffd"]
    # A run that is broken off says so at once, and loses nothing of what follows.
    assert stream(tokenizers["sentencepiece"], [*byte_tokens[:2], 3 + ord("x")]) == ["", "", "\ufffdx", ""]


def test_the_tokenizers_own_space_goes_only_at_the_start(tokenizers: dict[str, Tokenizer]) -> None:
    a = 3 + 256 + 3
    tokenizer = tokenizers["sentencepiece"]
    assert stream(tokenizer, [1, a, a]) == ["", "a", " a", ""]
    assert stream(tokenizer, [a, a], continuing=True) == [" a", " a", ""]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def run_stops(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    finder, given_out = StopStrings(stops), []
    for piece in pieces:
        text, matched = finder.push(piece)
        given_out.append(text)
        if matched:
            return given_out, True
    return [*given_out, finder.flush()], False


def expected_stop(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first moment at which the text ends with a stop string (the longest of them)."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@given(stops=STOPS, text=st.text("abc", max_size=30), cuts=st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=500)
def test_stop_strings_are_found_however_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    given_out, matched = run_stops(stops, pieces_of(text, cuts))
    assert ("".join(given_out), matched) == expected_stop(stops, text)


@given(stops=STOPS, text=st.text("abc", max_size=30))
def test_text_is_held_back_only_while_it_could_become_a_stop_string(stops: list[str], text: str) -> None:
    finder, seen, out = StopStrings(stops), "", ""
    for char in text:
        delta, matched = finder.push(char)
        seen, out = seen + char, out + delta
        if matched:
            return
        held = seen[len(out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_deltas() -> None:
    assert run_stops(["\n\nHuman"], ["Hi\n", "\nHu", "man: x"]) == (["Hi", "", ""], True)
    assert run_stops(["\n\nHuman"], ["Hi\n", "\nHi", "."]) == (["Hi", "\n\nHi", ".", ""], False)


def test_no_stop_strings_hold_nothing_back_and_empty_ones_are_refused() -> None:
    assert StopStrings([]).push("text") == ("text", False)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
