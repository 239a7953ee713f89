"""The table of settings: precedence, ranges, and errors that say where a wrong value stands and what to set."""

from __future__ import annotations

import argparse
import os
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvpool.daemon.settings import config as configuration
from kvpool.daemon.settings.config import Config, ConfigError, UserLimits
from kvpool.daemon.settings.idle import idle_settings
from kvpool.daemon.settings.options import options, parse_size, show_size


def load_text(tmp_path: Path, text: str, flags: dict[str, str | None] | None = None, **environ: str) -> Config:
    path = tmp_path / "kvpool.toml"
    path.write_text(text)
    return configuration.load(flags or {}, environ, path)


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    text = "max_num_seqs = 5\nthreads = 6\nblock_size = 32\n"
    config = load_text(tmp_path, text, {"max_num_seqs": "7"}, KVPOOL_MAX_NUM_SEQS="8", KVPOOL_THREADS="9")
    assert (config.max_num_seqs, config.threads, config.block_size) == (7, 9, 32)
    assert config.max_num_batched_tokens == Config().max_num_batched_tokens


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("\n\nmax_num_seq = 4\n", 3, "did you mean max_num_seqs?"),
        ("model = 'x'\nblock_size = 0\n", 2, "1 to 1024"),
        ("block_size = true\n", 1, "whole number"),
        ("block_size = 1.5\n", 1, "whole number"),
        ("# pool_bytes = 1\n\npool_bytes = '2 gigs'\n", 3, '"2GiB"'),
        ("device = 'gpu'\n", 1, "auto, cpu or cuda"),
        ("prefix_cache = 'yes'\n", 1, "on or off"),
        ("socket_mode = '0999'\n", 1, "octal"),
        ("socket_mode = '0777'\n", 1, "0600"),
        ("drain_timeout_s = nan\n", 1, "0 to 86400"),
        ("log_level = 3\n", 1, "debug"),
        ("[defaults]\nweight = -1\n", 2, "0.001 to 1000"),
        ("[defaults]\nwait = 1\n", 2, "did you mean weight?"),
        ("model = 'x'\n[users.nobody-of-this-name]\nweight = 2\n", 2, "no such user"),
        ("[users.0]\nweight = 1\n\nmax_blocks = 0\n", 4, "1 to 2147483647"),
        ("users.0.max_blocks = 'many'\n", 1, "1 to 2147483647"),
        ("users = 3\n", 1, "as a table"),
        ("[users]\n0 = 3\n", 2, "as a table"),
    ],
)
def test_errors_name_file_line_and_what_to_set(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/kvpool.toml:{line}: ")
    assert says in str(error.value)


def test_errors_of_flags_and_environment_name_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--threads: 'two' cannot be used"):
        load_text(tmp_path, "", {"threads": "two"})
    with pytest.raises(ConfigError, match=r"^KVPOOL_THREADS: '0' cannot be used"):
        load_text(tmp_path, "", KVPOOL_THREADS="0")
    with pytest.raises(ConfigError, match=r"KVPOOL_THREAD: no such setting; did you mean KVPOOL_THREADS\?"):
        load_text(tmp_path, "", KVPOOL_THREAD="2")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        configuration.load({}, {}, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"not valid TOML.*line 1"):
        load_text(tmp_path, "model = \n")
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        configuration.load({}, {}, tmp_path / "latin.toml")


def test_settings_are_checked_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise max_num_batched_tokens or lower max_num_seqs"):
        load_text(tmp_path, "max_num_seqs = 100\nmax_num_batched_tokens = 99\n")
    with pytest.raises(ConfigError, match="max_message_bytes"):
        load_text(tmp_path, "max_message_bytes = 1\n")
    with pytest.raises(ConfigError, match="tcp"):
        load_text(tmp_path, "address = 'tcp://*:5555'\n")


def test_printed_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    for text in [
        "",
        "model = 'a \"b\" \\u00e9'\npool_bytes = '1.5GiB'\n[users.0]\nweight = 2.5\n[defaults]\nmax_queued = 4\n",
    ]:
        config = load_text(tmp_path, text)
        assert load_text(tmp_path, configuration.show(config)) == config


def test_users_start_from_the_defaults(tmp_path: Path) -> None:
    config = load_text(tmp_path, f"[users.{os.getuid()}]\nmax_blocks = 7\n[defaults]\nweight = 3\n")
    assert config.limits_of(os.getuid()) == UserLimits(weight=3.0, max_blocks=7)
    assert config.limits_of(os.getuid() + 1) == UserLimits(weight=3.0)


def test_the_scheduler_gets_every_limit() -> None:
    config = Config(max_num_seqs=3, users={7: UserLimits(weight=2.0, max_running=1, tokens_per_s=5.0)})
    limits = config.scheduler_limits(max_model_len=99)
    assert (limits.max_num_seqs, limits.max_model_len, limits.max_queued) == (3, 99, config.max_queued_requests)
    assert {row.name for row in options(UserLimits)} == {row.name for row in fields(limits.of(7))}
    assert (limits.of(7).weight, limits.of(7).max_running, limits.of(8).weight) == (2.0, 1, 1.0)


def test_reload_tells_what_needs_a_restart() -> None:
    old = Config()
    new = replace(old, log_level="debug", block_size=32, users={1: UserLimits(weight=2.0)})
    assert old.changed(new) == (["log_level", "users"], ["block_size"])


def test_every_row_has_a_flag_that_parses() -> None:
    parser = argparse.ArgumentParser()
    configuration.add_flags(parser)
    for row in options(Config):
        value = row.kind.show(row.default).strip('"')
        assert getattr(parser.parse_args([row.flag, value]), row.name) == value
        assert row.kind.parse(tomllib.loads(f"x = {row.kind.show(row.default)}")["x"]) == row.default
    assert "KV" in parser.format_help() or "memory for keys" in parser.format_help()


def test_the_documented_table_is_the_table() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "configuration.md").read_text()
    assert text == configuration.reference(), "run: python -m kvpool.daemon.tools settings > docs/configuration.md"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("2GiB", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("512M", 512 << 20),
        ("1kb", 1000),
        ("7 B", 7),
        (5, 5),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "1 XiB", "1.5.5G", True, -1, 2**63, None, "9" * 40, "8388608TiB"]
)
def test_sizes_that_cannot_be_used(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [show_size(n) for n in (0, 1023, 1024, 3 << 29, 2 << 30)] == ["0 B", "1023 B", "1KiB", "1.50 GiB", "2GiB"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", []),
        ("prefix_cache = 'off'\njournal = 'off'\n", []),
        ("activations = 'int8'\nprefix_ttl_s = 60\ntcp_address = 'tcp://127.0.0.1:7000'\nremote_timeout_s = 5\n", []),
        ("prefix_cache = 'off'\nprefix_ttl_s = 60\n", ["prefix_ttl_s = 60.0 has no effect: prefix_cache is off"]),
        (
            "device = 'cuda'\nthreads = 2\nactivations = 'int8'\n",
            ['activations = "int8" has no effect: device is cuda', "threads = 2 has no effect: device is cuda"],
        ),
        (
            "device = 'cpu'\nproducts = 'fast'\ndtype = 'bfloat16'\nactivations = 'int8'\n",
            [
                'activations = "int8" has no effect: dtype holds weights as floats, not as codes',
                'products = "fast" has no effect: device is cpu',
            ],
        ),
        (
            "journal = 'off'\njournal_max_bytes = '8MiB'\n",
            ['journal_max_bytes = "8MiB" has no effect: journal is off'],
        ),
        (
            "server_key_file = '/a'\nauthorised_keys = '/b'\nremote_timeout_s = 5\n",
            [
                'server_key_file = "/a" has no effect: tcp_address is empty',
                'authorised_keys = "/b" has no effect: tcp_address is empty',
                "remote_timeout_s = 5.0 has no effect: tcp_address is empty",
            ],
        ),
    ],
)
def test_settings_that_change_nothing_are_named(tmp_path: Path, text: str, says: list[str]) -> None:
    assert idle_settings(load_text(tmp_path, text)) == says
