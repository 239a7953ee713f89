"""OpenAI's API in front of a real daemon, over real sockets, asked by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import base64
import importlib.util
import json
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from kvpool.client import Client
from kvpool.client.cli import __main__ as cli
from kvpool.client.gateway.answers import LOWEST_LOGPROB, Form, Token
from kvpool.client.wire.protocol import Call, Reply, Submit
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.fake_daemon import FakeDaemon, Peer, refuse, silent, trickle
from tests.support.gateway_process import GatewayProcess, events

MODEL = "model"  # the tiny model's folder
PROMPT = "The sea is"
CHAT = [{"role": "user", "content": "Where does the water go?"}]
SEEDED = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 2}
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
LONG_CHAT = {"messages": CHAT} | {name: value for name, value in LONG.items() if name != "prompt"}


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess("paced", max_model_len=512, max_num_seqs=40, pool_bytes="8MiB") as process:
        yield process


@pytest.fixture(scope="module")
def gateway(shared: DaemonProcess) -> Iterator[GatewayProcess]:
    with GatewayProcess(shared.address) as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def openai(gateway: GatewayProcess, daemon: DaemonProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


# ---- the same as the client library


def test_chat_gives_the_clients_tokens(openai: OpenAI, pool: Client) -> None:
    expected = pool.chat(CHAT, logprobs=3, **SEEDED)  # type: ignore[arg-type]
    asked = {"model": MODEL, "messages": CHAT, "logprobs": True, "top_logprobs": 3, **SEEDED}
    answer = openai.chat.completions.create(**asked)
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert (choice.index, choice.finish_reason) == (output.sample, output.finish_reason)
        assert choice.message.content == output.text
        assert [token.logprob for token in choice.logprobs.content] == output.logprobs
        tops = [[top.logprob for top in token.top_logprobs] for token in choice.logprobs.content]
        assert tops == [list(top.values()) for top in output.top_logprobs or []]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.usage.prompt_tokens, 24)


def test_a_stream_gives_the_same_as_a_whole_answer(openai: OpenAI) -> None:
    asked = {"model": MODEL, "messages": CHAT, "logprobs": True, "top_logprobs": 2, **SEEDED}
    whole = openai.chat.completions.create(**asked)
    *chunks, last = openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None and chunk.id == last.id for chunk in chunks)
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.content]
        assert tokens == choice.logprobs.content


def test_completions_of_text_and_of_token_ids(openai: OpenAI, pool: Client) -> None:
    prompts: list[Any] = [PROMPT, pool.tokenize("In the morning"), [5, 6, 7]]
    expected = [output for prompt in prompts for output in pool.generate(prompt, logprobs=2, **SEEDED).outputs]
    for prompt, outputs in ((prompts, expected), (prompts[1], expected[2:4])):
        answer = openai.completions.create(model=MODEL, prompt=prompt, logprobs=2, **SEEDED)
        assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
        for choice, output in zip(answer.choices, outputs, strict=True):
            assert choice.text == output.text
            assert choice.logprobs.token_logprobs == output.logprobs
    streamed: dict[int, str] = dict.fromkeys(range(6), "")
    offsets: dict[int, list[int]] = {index: [] for index in range(6)}
    for chunk in openai.completions.create(model=MODEL, prompt=prompts, logprobs=0, stream=True, **SEEDED):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert list(streamed.values()) == [output.text for output in expected]
    whole = openai.completions.create(model=MODEL, prompt=prompts, logprobs=0, **SEEDED)
    assert list(offsets.values()) == [choice.logprobs.text_offset for choice in whole.choices]


def test_sampling_has_kvpools_own_fields_too(openai: OpenAI, pool: Client) -> None:
    params = {"top_k": 3, "min_p": 0.05, "ignore_eos": True, "min_tokens": 9, "stop": ["zz"], "seed": 5}
    bias = {5: 8.5, 60: -100.0}
    expected = pool.generate(PROMPT, max_tokens=30, logit_bias=bias, **params)
    own = {name: params.pop(name) for name in ("top_k", "min_p", "ignore_eos", "min_tokens")}
    answer = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, logit_bias={str(key): x for key, x in bias.items()},
        extra_body=own | {"priority": -3, "deadline_s": 60.0}, **params,
    )  # fmt: skip
    assert answer.choices[0].text == expected.text


def test_stop_strings_end_an_answer(openai: OpenAI, pool: Client) -> None:
    text = pool.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True).text
    stop = text[6:8]
    answer = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop)
    assert answer.choices[0].text == text.partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_usage_tells_of_cached_tokens(openai: OpenAI) -> None:
    prompt = "The harbour master writes the names of the boats in a long book: which came in, which went out."
    for is_known in (False, True):
        usage = openai.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage
        assert usage is not None
        assert usage.total_tokens == usage.prompt_tokens + 2
        assert (usage.prompt_tokens_details.cached_tokens > 0) is is_known


def test_embeddings(openai: OpenAI, pool: Client) -> None:
    texts = [f"{PROMPT} {number}" for number in range(20)]  # more than are computed at once
    expected = pool.embed(texts)
    plain = openai.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert np.array_equal(np.array([item.embedding for item in plain.data], np.float32), expected)
    assert plain.usage.prompt_tokens == sum(len(pool.tokenize(text)) for text in texts)
    packed = openai.embeddings.create(model=MODEL, input=texts[0])  # base64 is its own choice
    assert np.array_equal(np.array(packed.data[0].embedding, np.float32), expected[0])


def test_base64_is_little_endian_float32(gateway: GatewayProcess, pool: Client) -> None:
    body = {"model": MODEL, "input": [5, 6], "encoding_format": "base64", "pooling": "last"}
    _, answer, _ = gateway.ask("/v1/embeddings", body)
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.array_equal(vector, pool.embed([[5, 6]], pooling="last")[0])


def test_models(openai: OpenAI, gateway: GatewayProcess) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).owned_by == "kvpool"
    assert gateway.ask("/health")[:2] == (200, {"status": "ok"})


def test_content_may_come_in_parts_and_answers_may_be_sent_back(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": 8}
    first = openai.chat.completions.create(messages=CHAT, **asked).choices[0].message
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Where does "}, {"type": "text", "text": "the water go?"}],
        }
    ]
    assert openai.chat.completions.create(messages=parts, **asked).choices[0].message.content == first.content
    again = [*CHAT, first.model_dump(), {"role": "user", "content": "Why?", "name": "ada"}]
    assert openai.chat.completions.create(messages=again, **asked).choices[0].finish_reason


def test_many_streams_at_once(gateway: GatewayProcess, openai: OpenAI, pool: Client) -> None:
    def stream(number: int) -> str:
        asked = {"model": MODEL, "prompt": f"{PROMPT} {number}", "max_tokens": 16, "seed": number, "stream": True}
        response = gateway.start("/v1/completions", asked).getresponse()
        return "".join(choice["text"] for event in events(response) for choice in event["choices"])

    with ThreadPoolExecutor(32) as threads:
        texts = list(threads.map(stream, range(32)))
    for number in (0, 13, 31):
        assert texts[number] == pool.generate(f"{PROMPT} {number}", max_tokens=16, seed=number).text


# ---- readers that leave, or stop


def finished(pool: Client, reason: str) -> int:
    return int(pool.stats()["finished_total"].get(reason, 0))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_hang_up_cancels(gateway: GatewayProcess, pool: Client, path: str, stream: bool) -> None:
    before = finished(pool, "cancelled")
    asked = LONG_CHAT if "chat" in path else LONG
    connection = gateway.start(path, asked | {"stream": stream})
    assert eventually(lambda: pool.stats()["sequences_running"] == 1)
    connection.close()
    assert eventually(lambda: pool.stats()["blocks_used"] == 0, 1.0)
    assert finished(pool, "cancelled") == before + 1


def test_a_reader_that_stops_holds_up_only_itself(gateway: GatewayProcess, pool: Client) -> None:
    asked = LONG_CHAT | {"max_tokens": 300, "stream": True, "logprobs": True, "top_logprobs": 20}
    sock = gateway.connect(receive_buffer_bytes=4096)
    response = gateway.start("/v1/chat/completions", asked, sock=sock).getresponse()
    assert eventually(lambda: [row["state"] for row in pool.ps()] == ["paused"])
    assert pool.ps()[0]["num_output_tokens"] < 250
    _, neighbour, _ = gateway.ask("/v1/completions", LONG | {"max_tokens": 9})
    assert neighbour["choices"][0]["text"] == pool.generate(PROMPT, max_tokens=9, temperature=0, ignore_eos=True).text
    choices = [choice for event in events(response) for choice in event["choices"]]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 300
    assert choices[-1]["finish_reason"] == "length"


def test_an_idle_gateway_does_not_wake_up(gateway: GatewayProcess, openai: OpenAI) -> None:
    openai.models.list()
    ticks, switches = gateway.cpu_ticks(), gateway.context_switches()
    time.sleep(1.0)
    assert gateway.cpu_ticks() - ticks <= 1
    assert gateway.context_switches() - switches <= 3


# ---- errors

TEXT, TALK, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
INVALID, TOO_LONG, UNSUPPORTED = "invalid_argument", "context_length_exceeded", "unsupported"
IMAGE = [{"type": "image_url"}]

ERRORS: list[tuple[str, Any, int, str | None, str | None]] = [
    (TEXT, b"{", 400, INVALID, None),
    (TEXT, b"[1]", 400, INVALID, None),
    (TEXT, b"\xff", 400, INVALID, None),
    (TEXT, b"[" * 100_000, 400, INVALID, None),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, INVALID, None),
    (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, INVALID, "temperature"),
    (TEXT, b'{"prompt": "a", "prompt": "b"}', 400, INVALID, None),
    (TEXT, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400, INVALID, None),
    (TEXT, {}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": []}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": ""}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": [True]}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": ["a"] * 129}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": [1, 99999]}, 400, INVALID, "prompt[1]"),
    (TEXT, {"prompt": [1, -1]}, 400, INVALID, "prompt[1]"),
    (TEXT, {"prompt": "\ud800"}, 400, INVALID, "prompt"),
    (TEXT, {"prompt": "a", "model": "\ud800"}, 400, INVALID, "model"),
    (TEXT, {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
    (TEXT, {"prompt": "a", "max_tokens": True}, 400, INVALID, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 5000}, 400, TOO_LONG, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, INVALID, "temperature"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, INVALID, "stop[0]"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, INVALID, "logprobs"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, INVALID, "logit_bias"),
    (TEXT, {"prompt": "a", "max_token": 3}, 400, INVALID, "max_token"),
    (TEXT, {"prompt": "a", "\ud800": 3}, 400, INVALID, "?"),
    (TEXT, {"prompt": "a", "echo": True}, 400, UNSUPPORTED, "echo"),
    (TEXT, {"prompt": "a", "stream": 1}, 400, INVALID, "stream"),
    (TEXT, {"prompt": "a", "stream_options": {}}, 400, INVALID, "stream_options"),
    (TEXT, {"prompt": "a", "deadline_s": 0}, 504, "deadline", "deadline_s"),
    (TEXT, {"prompt": "a", "deadline_s": 0, "stream": True}, 504, "deadline", "deadline_s"),
    (TALK, {"messages": []}, 400, INVALID, "messages"),
    (TALK, {"messages": ["a"]}, 400, INVALID, "messages[0]"),
    (TALK, {"messages": [{"role": "owl", "content": ""}]}, 400, INVALID, "messages[0].role"),
    (TALK, {"messages": [{"role": "user"}]}, 400, INVALID, "messages[0].content"),
    (TALK, {"messages": [{"role": "user", "content": IMAGE}]}, 400, UNSUPPORTED, "messages[0].content[0]"),
    (TALK, {"messages": CHAT, "tools": [{"type": "function"}]}, 400, UNSUPPORTED, "tools"),
    (TALK, {"messages": CHAT, "response_format": {"type": "json"}}, 400, UNSUPPORTED, "response_format"),
    (TALK, {"messages": CHAT, "top_logprobs": 2}, 400, INVALID, "top_logprobs"),
    (TALK, {"messages": CHAT, "max_completion_tokens": -1}, 400, INVALID, "max_completion_tokens"),
    (TALK, {"messages": CHAT, "max_completion_tokens": 5000}, 400, TOO_LONG, "max_completion_tokens"),
    (TALK, {"messages": CHAT, "max_completion_tokens": 1, "max_tokens": 1}, 400, INVALID, "max_completion_tokens"),
    (EMBED, {"input": None}, 400, INVALID, "input"),
    (EMBED, {"input": ""}, 400, INVALID, "input"),
    (EMBED, {"input": [0, 99999]}, 400, INVALID, "input[1]"),
    (EMBED, {"input": "a", "dimensions": 8}, 400, UNSUPPORTED, "dimensions"),
    (EMBED, {"input": "a", "encoding_format": "int8"}, 400, INVALID, "encoding_format"),
    (TEXT, b"x" * (9 << 20), 413, None, None),
    (TEXT, None, 405, None, None),
    ("/v1/nothing", {}, 404, None, None),
    ("/v1/models/other", None, 404, "model_not_found", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), ERRORS)
def test_errors(
    gateway: GatewayProcess, path: str, body: Any, status: int, code: str | None, param: str | None
) -> None:
    found, answer, _ = gateway.ask(path, body)
    assert (found, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["message"]


def test_openais_client_understands_errors(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.completions.create(model=MODEL, prompt="a", max_tokens=-1)
    assert (caught.value.code, caught.value.param) == ("invalid_argument", "max_tokens")


def test_pages_of_others_cannot_ask(gateway: GatewayProcess) -> None:
    """What a browser sends without asking first: a form; and what it sends to a name that was bent to this machine."""
    for headers, status in (({"Content-Type": "text/plain"}, 415), ({"Host": "evil.example"}, 403)):
        assert gateway.ask("/v1/completions", {"prompt": "a"}, headers=headers)[0] == status


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "kvpool.sock"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_argument", 400), ("too_long", 400), ("never_fits", 400), ("unsupported", 400), ("not_owner", 403),
        ("not_found", 404), ("quota", 429), ("busy", 429), ("cancelled", 499), ("internal", 500), ("numeric", 500),
        ("shutting_down", 503), ("deadline", 504),
    ],
)  # fmt: skip
def test_codes_are_statuses(refusing: GatewayProcess, code: str, status: int) -> None:
    for stream in (False, True):
        asked = {"prompt": code, "stream": stream}
        assert refusing.ask("/v1/completions", asked)[0] == status


@pytest.fixture(scope="module")
def refusing() -> Iterator[GatewayProcess]:
    """In front of a daemon that is not well, and refuses a prompt with the code that it names."""

    def script(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            refuse(str(message.prompt), retry_after_ms=1234)(peer, message)
        elif isinstance(message, Call):
            peer.send(Reply(peer.epoch, message.call_id, {"healthy": False, "health_reason": "stuck"}))

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kvpool.sock"
        with FakeDaemon(path, script), GatewayProcess(str(path)) as process:
            yield process


def test_busy_says_when_to_try_again(refusing: GatewayProcess) -> None:
    status, answer, headers = refusing.ask("/v1/completions", {"prompt": "busy"})
    assert (status, headers["Retry-After"], headers["retry-after-ms"]) == (429, "2", "1234")
    assert (answer["error"]["type"], answer["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_health_is_the_daemons(refusing: GatewayProcess) -> None:
    assert refusing.ask("/health")[:2] == (503, {"status": "unhealthy", "reason": "stuck"})


def test_a_daemon_that_comes_goes_and_comes_back(path: Path) -> None:
    asked = {"prompt": "a", "max_tokens": 3}
    with GatewayProcess(str(path)) as gateway:
        assert "it answers 503 until there is a daemon" in gateway.greeting
        for _ in range(2):
            for answer in (gateway.ask("/v1/completions", asked), gateway.ask("/health")):
                assert (answer[0], answer[1]["error"]["code"]) == (503, "connection_lost")
            with FakeDaemon(path, trickle):
                response = gateway.start("/v1/completions", asked | {"stream": True}).getresponse()
                stream = events(response)
                assert next(stream)["choices"][0]["text"] == " t7"
            (error,) = stream
            assert error["error"]["code"] == "connection_lost"


def test_sigterm_lets_answers_finish(daemon: DaemonProcess) -> None:
    asked = LONG | {"max_tokens": 100, "stream": True}
    with GatewayProcess(daemon.address) as gateway:
        response = gateway.start("/v1/completions", asked).getresponse()
        stream = events(response)
        next(stream)
        assert gateway.stop() == (0, "")
        assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"


def _refuses(gateway: GatewayProcess) -> bool:
    try:
        gateway.connect().close()
    except ConnectionRefusedError:
        return True
    return False


# ---- who may come in


def write_keys(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_private_socket_and_keys_and_a_second_sigterm(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_keys(path.with_name("keys"), "# ours\nsecret-secret-1234\n\nother-other-5678\n")
    http_path = path.with_name("http.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(http_path))  # as a gateway that was killed leaves it
    arguments = ("--socket", str(http_path), "--api-key-file", str(keys))
    with FakeDaemon(path, silent) as daemon, GatewayProcess(str(path), *arguments) as gateway:
        assert stat.S_IMODE(http_path.stat().st_mode) == 0o600
        assert cli.main(["gateway", "--socket", str(http_path)]) == 1
        assert "is served by another process" in capsys.readouterr().err
        for given in ("Bearer secret-secret-1234", "bearer other-other-5678"):
            assert gateway.ask("/v1/models", headers={"Authorization": given, "Host": "box.example"})[0] == 200
        for wrong in ("", "Bearer", "Bearer secret", "Basic secret-secret-1234", "Bearer # ours", "Bearer \xff"):
            status, answer, headers = gateway.ask("/v1/models", headers={"Authorization": wrong})
            assert (status, answer["error"]["code"], headers["WWW-Authenticate"]) == (401, "invalid_api_key", "Bearer")
        allowed = {"Authorization": "Bearer other-other-5678"}
        waiting = gateway.start("/v1/completions", {"prompt": "a"}, headers=allowed)
        daemon.wait_for_type(Submit)
        gateway.process.terminate()
        assert eventually(lambda: _refuses(gateway))
        assert gateway.stop() == (0, "")  # the second signal does not wait for that answer
        waiting.close()
    assert not http_path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines; set --api-key-file"),
        (["--host", "::"], "can be reached from other machines; set --api-key-file"),
        (["--host", "no such host"], "is no address of this machine"),
        (["--port", "{taken}"], "cannot be used: Address already in use"),
        (["--socket", "{directory}/kept"], "cannot be used"),
        (["--socket", "{directory}/" + "x" * 120], "cannot be used"),
        (["--api-key-file", "{directory}/none"], "cannot be read"),
        (["--api-key-file", "{directory}/empty"], "holds no key"),
        (["--api-key-file", "{directory}/open"], "may be read by everybody; chmod 600"),
        (["--api-key-file", "{directory}/short"], "at least 16 printable"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write_keys(tmp_path / "empty", "# none\n")
    write_keys(tmp_path / "open", "secret-secret-1234\n", 0o644)
    write_keys(tmp_path / "short", "secret\n")
    (tmp_path / "kept").write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [argument.format(directory=tmp_path, taken=taken.getsockname()[1]) for argument in arguments]
        assert cli.main(["gateway", *given]) == 1
    assert message in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "precious"


def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["gateway"]) == 1
    assert "pip install 'kvpool[gateway]'" in capsys.readouterr().err


def test_minus_infinity_is_a_number_in_json() -> None:
    token = Token("a", float("-inf"), (("b", float("-inf")),))
    for is_chat in (True, False):
        piece = Form("id", "m", 0, is_chat, True).piece(0, "a", [token], 0)
        assert str(LOWEST_LOGPROB) in json.dumps(piece, allow_nan=False)
