"""The command line against a scripted daemon: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client.arena.pool_map import PoolMap
from kvpool.client.cli import __main__ as cli
from kvpool.client.cli import doctor as cli_doctor
from kvpool.client.cli import tools as cli_tools
from kvpool.client.cli.figures import parse_size, show_bytes, show_count, show_duration, show_share
from kvpool.client.cli.terminal import Column, Terminal, clip, safe, table, width_of
from kvpool.client.cli.top_view import History, View, draw
from kvpool.client.wire.errors import InvalidArgument
from kvpool.client.wire.protocol import Call, Cancel, Failed, Reply, Submit, pack_token_ids
from tests.support.fake_daemon import FakeDaemon, Peer, Script, count_up, refuse, trickle

NUM_BLOCKS = 40


def pool_map_value() -> dict[str, Any]:
    """A pool as the daemon describes it: a shared block, cached ones, one of somebody else."""
    states = np.zeros(NUM_BLOCKS, dtype=np.uint8)
    ref_counts = np.zeros(NUM_BLOCKS, dtype="<u2")
    owners = np.full(NUM_BLOCKS, -1, dtype="<i4")
    for block, count in ((0, 2), (1, 1), (2, 1), (3, 1)):
        states[block], ref_counts[block], owners[block] = 1, count, 1000
    states[4:7], owners[3] = 2, -2
    return {
        "block_size": 16,
        "num_blocks": NUM_BLOCKS,
        "states": states.tobytes(),
        "owners": owners.tobytes(),
        "ref_counts": ref_counts.tobytes(),
        "sequences": [sequence_row(1, "running", [0, 1]), sequence_row(2, "waiting", [0, 2])],
        "counters": {"model": "fake", "clients": 2, "uptime_s": 75.0, "kv_waste_ratio": 0.031, "epoch": 1},
    }


def sequence_row(number: int, state: str, blocks: list[int]) -> dict[str, Any]:
    return {
        "sequence_id": number, "request_id": f"request-{number}", "sample": 0, "uid": 1000, "user": "ada", "pid": 1,
        "client_name": "notebook\x1b[31m", "state": state, "wait_reason": "the queue" if state == "waiting" else "",
        "num_tokens": 30, "num_output_tokens": 12, "num_blocks": len(blocks), "blocks": pack_token_ids(blocks),
        "priority": 0, "age_s": 4.0, "num_cached_tokens": 0,
    }  # fmt: skip


def answers(peer: Peer, message: Any) -> None:
    """Generates as `count_up`, and answers calls as the daemon does."""
    values = {
        "stats": pool_map_value()["counters"] | {"blocks_total": 40, "finished_total": {"stop": 3}, "step_ms": 12.5},
        "ps": pool_map_value()["sequences"],
        "map": pool_map_value(),
        "cancel": {"cancelled": 1},
        "reload": {"changed": ["max_clients"]},
        "fsck": {"consistent": False, "error": "block 3 has two owners"},
    }
    if isinstance(message, Call) and message.method == "watch_map":
        peer.send(Failed(peer.epoch, "unsupported", "no map is shared", call_id=message.call_id))
    elif isinstance(message, Call):
        peer.send(Reply(peer.epoch, message.call_id, values.get(message.method, {})))
    else:
        count_up(peer, message)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "kvpool.sock"
        monkeypatch.setenv("KVPOOL_ADDRESS", str(found))
        monkeypatch.delenv("COLUMNS", raising=False)
        yield found


@pytest.fixture
def daemon(path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(path, answers) as running:
        yield running


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert (captured.err == "") == (code == 0), captured.err
    return captured.out


# ---- generate and chat


def test_generate_streams(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "The sea", "--max-tokens", "3", "--temperature", "0", "--stop", "a", "--priority", "2"]
    assert output_of(capsys, *arguments) == " t0 t1 t2\n"
    message = daemon.wait_for_type(Submit)
    assert (message.prompt, message.priority) == ("The sea", 2)
    assert message.params == {"max_tokens": 3, "temperature": 0.0, "stop": ("a",)}


def test_generate_as_json(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(output_of(capsys, "generate", "x", "--max-tokens", "2", "--json"))
    assert (result["text"], result["token_ids"], result["finish_reason"]) == (" t0 t1", [0, 1], "length")
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}


def test_generate_reads_stdin(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    output_of(capsys, "generate", "--max-tokens", "1")
    assert daemon.wait_for_type(Submit).prompt == "from a pipe"


def test_chat_remembers(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n/quit\nfour\n"))
    assert output_of(capsys, "chat", "--max-tokens", "1", "--system", "Be terse.") == " t0\n t0\n t0\n"
    said = [[turn.content for turn in message.messages] for message in daemon.received if isinstance(message, Submit)]
    assert said == [["Be terse.", "one"], ["Be terse.", "one", " t0", "two"], ["Be terse.", "three"]]


def test_an_error_does_not_end_a_persons_conversation(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_second_question(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit) and message.messages and message.messages[-1].content == "two":
            refuse("too_long")(peer, message)
        else:
            count_up(peer, message)

    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["one", "two", "three", "/quit"])
    monkeypatch.setattr("sys.stdin", Keyboard())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with FakeDaemon(path, no_second_question) as daemon:
        assert cli.main(["chat", "--max-tokens", "1"]) == 0
    assert "too_long" in capsys.readouterr().err
    last = [message for message in daemon.received if isinstance(message, Submit)][-1]
    assert [turn.content for turn in last.messages or ()] == ["one", " t0", "three"]


def ends(reason: str) -> Script:
    def script(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            peer.accept(message.request_id)
            peer.tokens(message.request_id, 0, [7])
            peer.finish(message.request_id, reason)

    return script


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_an_answer_that_was_cut_short_is_no_success(
    path: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    with FakeDaemon(path, ends(reason)):
        assert cli.main(["generate", "x"]) == 1
        captured = capsys.readouterr()
        assert captured.out == " t7\n"
        assert reason in captured.err
        assert cli.main(["generate", "x", "--json"]) == 0  # it says so itself


# ---- streams that are not what one hopes for


def test_a_terminal_may_lack_characters(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    assert cli.main(["generate", "x", "--max-tokens", "0"]) == 0
    assert ascii_only.errors == "replace"
    print("é…")
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b"\n??\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [["stats"], ["generate", "x"], ["generate"], ["chat"]])
def test_closed_streams_are_empty(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}", None)
    assert cli.main(command) == 0
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_told_of(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["stats"], ["generate", "x"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr("sys.stdout", full)
            assert cli.main(command) == 1
        assert capsys.readouterr().err == "kvpool: No space left on device\n"


def test_what_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["generate", "a\udcff"]) == 1
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
        assert cli.main(["generate"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert all("utf-8 text" in line for line in told)


# ---- looking


def test_ps_fits_in_80_columns_without_colour(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = output_of(capsys, "ps").splitlines()
    assert lines[0].split() == ["ID", "REQUEST", "USER", "COMMAND", "STATE", "TOKENS", "BLOCKS", "AGE", "WHY"]
    assert "waiting" in lines[2]
    assert "the queue" in lines[2]
    assert all(width_of(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)


def test_a_pipe_gets_whole_lines(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert "notebook\ufffd[31m 1" in output_of(capsys, "ps")


def test_ps_and_stats_as_json(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output_of(capsys, "ps", "--json"))[1]["blocks"] == [0, 2]
    assert json.loads(output_of(capsys, "stats", "--json"))["blocks_total"] == 40


def test_stats_show_units(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    shown = dict(line.split() for line in output_of(capsys, "stats").replace(" %", "%").splitlines())
    assert shown["kv_waste_ratio"] == "3.1%"
    assert shown["uptime_s"] == "1m15s"
    assert shown["step_ms"] == "12ms"
    assert shown["finished_total.stop"] == "3"


def test_version_names_both_ends(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model fake, epoch 1" in output_of(capsys, "version")


def test_top_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of(capsys, "top", "--once")
    assert "Bbc?:::." in shown  # block 0 is shared, 3 is of somebody else, 4 to 6 are cached
    assert "request-1" in shown
    assert "\x1b" not in shown
    assert all(width_of(line) <= 80 for line in shown.splitlines())


def test_top_as_json(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = json.loads(output_of(capsys, "top", "--once", "--json"))
    assert snapshot["states"][:8] == [1, 1, 1, 1, 2, 2, 2, 0]
    assert snapshot["sequences"][0]["blocks"] == [0, 1]


@pytest.mark.parametrize("leave", [None, signal.SIGTERM])
def test_top_lives_in_a_terminal(daemon: FakeDaemon, path: Path, leave: signal.Signals | None) -> None:
    """Draws with colour on a screen of its own, obeys keys, and leaves the terminal as it found it."""
    main, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool.client.cli", "top", "--interval", "30"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"},
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = read_until(main, "s sort")
        assert "\x1b[?1049h" in shown
        assert "◆" in shown
        os.write(main, b"s")
        read_until(main, "by tokens")
        os.write(main, b"/")
        read_until(main, "filter: ")
        os.write(main, b"nobodyx")
        read_until(main, "nobodyx▏")
        os.write(main, b"\x7f")
        read_until(main, "no sequences with 'nobody'")
        os.write(main, b"\x1b")
        read_until(main, "c cancel")
        os.write(main, b"j")
        read_until(main, "\x1b[7m")
        os.write(main, b"c")
        read_until(main, "cancelled 1")
        os.write(main, b"q") if leave is None else process.send_signal(leave)
        assert "\x1b[?1049l" in read_until(main, "\x1b[?1049l")
        assert process.wait(10) == (0 if leave is None else 128 + leave)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    call = daemon.wait_for(lambda messages: [m for m in messages if getattr(m, "method", "") == "cancel"])[0]
    assert call.arguments == {"request_id": "1"}


def read_until(fd: int, wanted: str, limit_s: float = 20.0) -> str:
    text = b""
    until = time.monotonic() + limit_s
    while wanted.encode() not in text:
        if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            raise AssertionError(f"{wanted!r} did not come; there was {text!r}")
        text += os.read(fd, 65536)
    return text.decode(errors="replace")


# ---- changing


def test_admin_commands_say_what_they_did(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "cancel", "request-1") == "cancelled 1 request\n"
    assert output_of(capsys, "drain") == "draining\n"
    assert output_of(capsys, "reload") == "reloaded: max_clients\n"
    assert output_of(capsys, "resize", "1.5GiB") == "the pool has 1.5 GiB\n"
    asked = [message for message in daemon.received if isinstance(message, Call)]
    assert [(call.method, call.arguments) for call in asked] == [
        ("cancel", {"request_id": "request-1"}),
        ("drain", None),
        ("reload", None),
        ("resize", {"pool_bytes": 3 << 29}),
    ]


def test_fsck_fails_where_something_is_wrong(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fsck"]) == 1
    assert capsys.readouterr().out == "error: block 3 has two owners\n"


# ---- going wrong


@pytest.mark.parametrize(
    "arguments", [["generate", "x"], ["ps"], ["stats"], ["top", "--once"], ["cancel", "x"], ["fsck"], ["drain"]]
)
def test_an_error_is_one_line(path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvpool: no daemon: ")
    assert captured.err.count("\n") == 1


def test_a_refusal_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeDaemon(path, refuse("busy")):
        assert cli.main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "kvpool: refused: busy\n"


def test_a_wrong_value_names_its_flag(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--temperature", "-1"]) == 1
    assert "temperature: must be a number from 0" in capsys.readouterr().err
    assert cli.main(["resize", "much"]) == 1
    assert "20GiB" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["cancel"], ["generate", "x", "--max-tokens", "many"]])
def test_wrong_usage_is_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_ctrl_c_is_130_and_cancels(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvpool.client.cli", "generate", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.read(3) == b" t7"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert b"Traceback" not in errors
        daemon.wait_for_type(Cancel)


def test_a_reader_who_leaves_is_no_error(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool.client.cli", "generate", "x", "--max-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_tools_name_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli_tools, "REQUIRED", ("numpy", "no_such_package"))
    assert cli.main(["pull", "smollm2-135m"]) == 1
    assert capsys.readouterr().err == "kvpool: needs no_such_package; install them with pip install 'kvpool[daemon]'\n"


def test_tools_run_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_tools, "REQUIRED", ())
    monkeypatch.setattr(cli_tools, "TOOLS", "json.tool")
    assert cli.main(["convert", "a", "b"]) == 2  # what json.tool says of so many files


# ---- doctor


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's half of the doctor is not the client's to test."""
    monkeypatch.setattr(cli_tools, "REQUIRED", ("no_such_package",))


@pytest.mark.usefixtures("without_tools")
def test_doctor_finds_a_daemon_in_order(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output_of(capsys, "doctor")
    assert "problem" not in shown
    assert "ok      daemon          fake, 64 blocks" in shown
    findings = {finding["name"]: finding for finding in json.loads(output_of(capsys, "doctor", "--json"))}
    assert findings["numpy"]["ok"]
    assert findings["daemon extra"]["ok"] is None


@pytest.mark.usefixtures("without_tools")
def test_doctor_says_what_is_wrong(path: Path) -> None:
    def problems() -> dict[str, str]:
        found = cli_doctor.examine(str(path), {})
        return {finding.name: finding.detail for finding in found if finding.ok is False}

    assert "does not exist" in problems()["socket"]
    path.touch()
    assert "is no socket" in dict(cli_doctor_findings(path))[f"{path}"]
    lock = path.with_name("kvpool.sock.lock")
    lock.write_text("4194305\n")
    assert "which is gone" in problems()["lock"]
    lock.write_text(f"{os.getpid()}\n")
    assert "lock" not in problems()
    assert "no daemon" in problems()["daemon"]
    missing = {f.name: f for f in cli_doctor.examine(str(path.parent / "no" / "x.sock"), {})}
    assert "install -d" in missing["directory"].advice


def cli_doctor_findings(path: Path) -> list[tuple[str, str]]:
    """(path, detail) of the findings about sockets."""
    return [
        (finding.detail.split()[0], finding.detail)
        for finding in cli_doctor.examine(str(path), {})
        if finding.name == "socket"
    ]


@pytest.mark.usefixtures("without_tools")
def test_doctor_cuts_nothing_off(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "its log says why (journalctl -u kvpoold, or run kvpoold in a terminal)"
    assert cli.main(["doctor"]) == 1
    assert f"-> {advice}\n" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["doctor"]) == 1
    narrow = capsys.readouterr().out
    assert advice in " ".join(narrow.split())
    assert all(width_of(line) <= 44 for line in narrow.splitlines() if str(path) not in line)


def test_doctor_fails_when_something_is_wrong(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 1
    assert "-> start kvpoold" in capsys.readouterr().out


# ---- figures and lines


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("20GiB", 20 << 30), ("1.5 mib", 3 << 19), ("2GB", 2 * 10**9), ("4K", 4096)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1XB", "1e9", "GiB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_size(text)


def test_figures_are_short() -> None:
    assert [show_count(n) for n in (0, 1234, 99_999, 123_456, 1_234_567)] == ["0", "1,234", "99,999", "123k", "1.2M"]
    assert [show_bytes(n) for n in (0, 1023, 1536, 20 << 30)] == ["0 B", "1023 B", "1.5 KiB", "20.0 GiB"]
    assert [show_duration(s) for s in (0.0123, 12.34, 248, 11_100, 187_200)] == [
        "12ms", "12.3s", "4m08s", "3h05m", "2d04h",
    ]  # fmt: skip
    assert [show_share(x) for x in (0, 0.004, 0.0213, 0.41, 1)] == ["0 %", "0.4 %", "2.1 %", "41 %", "100 %"]


def test_lines_are_clipped_by_columns() -> None:
    assert clip([("abc", ""), ("def", "1")], 6) == [("abc", ""), ("def", "1")]
    assert clip([("abc", ""), ("def", "1")], 5) == [("abc", ""), ("d…", "1")]
    assert clip([("日本語", "")], 5) == [("日本…", "")]
    assert width_of("日本e\u0301") == 5


def test_text_of_others_cannot_move_the_cursor() -> None:
    assert safe("a\x1b[2Jb\r\n") == "a\ufffd[2Jb\ufffd\n"


def test_colour_is_for_people() -> None:
    terminal = Terminal.of(io.StringIO(), {})
    assert (terminal.width, terminal.colour) == (80, False)
    assert Terminal(80, 24, True, True).show([("x", "31")]) == "\x1b[31mx\x1b[0m"
    assert Terminal(80, 24, False, True).show([("x", "31")]) == "x"
    assert Terminal(80, 24, False, False).show([("x…", "")]) == "x?"


def test_tables_give_way_where_they_may() -> None:
    columns = (Column("ID", right=True), Column("NAME", share=1, min_width=4), Column("N", right=True))
    rows = [[("1", ""), ("a rather long name", ""), ("100", "")]]
    lines = ["".join(text for text, _ in line) for line in table(columns, rows, 18)]
    assert lines == ["ID  NAME         N", " 1  a rather…  100"]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("num_blocks", [0, 1, 39, 5000])
def test_top_fits_every_screen(width: int, colour: bool, num_blocks: int) -> None:
    value = pool_map_value()
    times = -(-num_blocks // NUM_BLOCKS)
    for name, size in (("states", 1), ("owners", 4), ("ref_counts", 2)):
        value[name] = (value[name] * times)[: num_blocks * size]
    pool = PoolMap.of(value | {"num_blocks": num_blocks, "sequences": tuple(value["sequences"])})
    terminal = Terminal(width, 24, colour, True)
    rows, speed = History().rows(pool, 0.0)
    for view in (View(), View(selected=rows[0].sequence_id), View(filter="nothing like this")):
        lines = draw(pool, rows, speed, view, terminal)
        assert len(lines) <= 24
        assert all(sum(width_of(text) for text, _ in clip(line, width)) <= width for line in lines)


def test_the_chosen_sequence_is_told_of_in_full_and_the_filter_leaves_out_others() -> None:
    value = pool_map_value()
    pool = PoolMap.of(value | {"sequences": tuple(value["sequences"])})
    pool.sequences[0] |= {"ttft_s": 0.25, "credit": 7, "wait_reason": "its reader granted no more tokens"}
    rows, speed = History().rows(pool, 0.0)
    first, second = rows[0].sequence_id, rows[1].sequence_id
    lines = draw(pool, rows, speed, View(selected=first), Terminal(80, 40, False, True))
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    for part in ("its reader granted no more tokens", "first token after 250ms", "credit 7"):
        assert part in text
    assert "TTFT" not in text
    wide = draw(pool, rows, speed, View(), Terminal(160, 40, False, True))
    assert any("TTFT CREDIT" in "".join(part for part, _ in line) for line in wide)
    shown = View(filter="GRANTED no").shown(rows)
    assert [row.sequence_id for row in shown] == [first]
    assert [row.sequence_id for row in View(sort="ttft").shown(rows)] == [first, second]


def test_speeds_come_from_two_looks() -> None:
    value = pool_map_value()
    pool = PoolMap.of(value | {"sequences": tuple(value["sequences"])})
    history = History()
    rows, speed = history.rows(pool, 10.0)
    assert [row.tokens_per_s for row in rows] == [3.0, 3.0]  # 12 tokens in 4 s
    for figures in pool.sequences:
        figures["num_output_tokens"] += 10
    pool.counters["tokens_generated_total"] = 20
    rows, speed = history.rows(pool, 12.0)
    assert [row.tokens_per_s for row in rows] == [5.0, 5.0]
    assert speed == 10.0
    assert [row.num_shared for row in rows] == [1, 1]


def test_a_person_is_told_how_it_went(daemon: FakeDaemon) -> None:
    main, theirs = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-m", "kvpool.client.cli", "generate", "x", "--max-tokens", "2"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    assert process.stdout == b" t0 t1\n"
    assert "length, 3 + 2 tokens, 1 cached, first after" in read_until(main, "first after")
    os.close(main)
