"""Every setting of the daemon in one table, and the one way in which flags, environment and file become a `Config`.

Precedence: flags, then `KVPOOL_NAME` in the environment, then `name` in the TOML file, then the defaults below.
Nothing is guessed: an unknown name or a wrong value is an error that says where it stands and what to set.
"""

from __future__ import annotations

import argparse
import difflib
import pwd
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...client.address import LOOPBACK_HOSTS, parse_tcp
from ...client.curve import KEY_FILE_NAME, SERVER_KEY_NAME
from ..scheduling.limits import OwnerLimits, SchedulerLimits
from .options import (
    LISTEN,
    MODE,
    SWITCH,
    TCP,
    ConfigError,
    Option,
    choice,
    number,
    option,
    options,
    quote,
    size,
    text,
    whole,
)

FOREIGN_ENVIRONMENT = ("KVPOOL_CONFIG", "KVPOOL_CACHE_DIR", "KVPOOL_TIMEOUT_S", SERVER_KEY_NAME, KEY_FILE_NAME)
"""Names in the environment that begin like ours and are read by somebody else: command line, model room, clients."""

MIN_JOURNAL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What one user may have at once. `[defaults]` holds for everybody, `[users.NAME_or_uid]` for one.

    The names are those of `limits.OwnerLimits`, which the scheduler obeys; auto means no limit of its own.
    """

    weight: float = option(1.0, number(0.001, 1000.0), "share of the tokens against other users", reloadable=True)
    max_blocks: int | None = option(None, whole(1, 2**31 - 1, auto=True), "blocks held at once", reloadable=True)
    max_sequences: int | None = option(
        None, whole(1, 1_000_000, auto=True), "sequences alive at once: queued, running and paused", reloadable=True
    )
    max_running: int | None = option(None, whole(1, 4096, auto=True), "sequences in one step", reloadable=True)
    max_queued: int | None = option(None, whole(1, 1_000_000, auto=True), "sequences waiting at once", reloadable=True)
    max_pinned_blocks: int | None = option(
        None, whole(0, 2**31 - 1, auto=True), "blocks pinned in the prefix cache (auto: an eighth)", reloadable=True
    )
    tokens_per_s: float | None = option(
        None, number(0.1, 1e9, auto=True), "tokens computed per second, prompts included", reloadable=True
    )
    max_priority: int | None = option(
        None, whole(-100, 100, auto=True), "a more urgent request is treated as this urgent", reloadable=True
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings. Sizes are bytes, times are seconds; None stands for auto."""

    model: str = option("", text("PATH|NAME"), "a Hugging Face directory, a .gguf file, or the name of a pulled model")
    address: str = option("auto", text("ADDRESS"), "where clients connect: the path of a Unix socket, or ipc://PATH")
    device: str = option("auto", choice("auto", "cpu", "cuda"), "where the model runs")
    dtype: str = option(
        "auto",
        choice("auto", "float32", "bfloat16", "float16", "int16", "int8", "int4"),
        "how weights are held; auto: a quantised file's own codes (CPU), else 16 bits; int16 (CPU), int8, int4: groups",
    )
    kv_dtype: str = option(
        "auto",
        choice("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
        "how keys and values are held; int8 has a scale per head and token, fp8 is for GPUs only",
    )
    activations: str = option(
        "auto", choice("auto", "float32", "int16", "int8"), "in products with quantised weights (CPU); int8: of 4 bits"
    )
    products: str = option(
        "exact",
        choice("exact", "fast"),
        "matrix products on a GPU; fast: the vendor's for prompts, whose bits then depend on how they were cut",
    )
    pool_bytes: int | None = option(
        None, size(auto=True), "memory for keys and values; auto: what the sequences can use at most, as far as it fits"
    )
    block_size: int = option(16, whole(1, 1024), "tokens in one block")
    max_num_seqs: int = option(64, whole(1, 4096), "sequences in one step")
    max_num_batched_tokens: int = option(
        512, whole(1, 1_000_000), "tokens in one step, prompt chunks and decodes together"
    )
    max_model_len: int | None = option(
        None, whole(2, 16_777_216, auto=True), "tokens of a sequence, prompt and output; auto: the model's own limit"
    )
    threads: int | None = option(None, whole(1, 1024, auto=True), "threads of the CPU back end; auto: one per core")
    prefix_cache: bool = option(True, SWITCH, "keep blocks of finished sequences for prompts that begin the same way")
    prefix_ttl_s: float = option(
        0.0,
        number(0.0, 31_536_000.0, "SECONDS"),
        "how long such blocks are kept unused; 0: until their memory is needed",
    )
    reservation: str = option(
        "on-demand",
        choice("on-demand", "max", "pow2", "oracle"),
        "when blocks are taken; all but on-demand exist to measure the old ways",
    )
    host_pool_bytes: int = option(0, size(), "memory for blocks of preempted sequences if that is faster; 0: recompute")
    max_queued_requests: int = option(
        1024, whole(1, 1_000_000), "sequences waiting, all users together", reloadable=True
    )
    ageing_s: float = option(
        10.0,
        number(0.1, 86_400.0, "SECONDS"),
        "a user who waits and has nothing running in a priority class is one class more urgent after each",
        reloadable=True,
    )
    max_clients: int = option(1024, whole(1, 65_536), "client sessions at once", reloadable=True)
    max_message_bytes: int = option(4 << 20, size(), "largest message a client may send")
    arena: bool = option(True, SWITCH, "memory shared with each client of this machine, for prompts, tokens and logits")
    lifeline_grace_s: float = option(
        5.0,
        number(0.1, 3600.0, "SECONDS"),
        "how long a session may own sequences before its lifeline is connected",
        reloadable=True,
    )
    health_limit_s: float = option(
        30.0,
        number(0.1, 86_400.0, "SECONDS"),
        "unhealthy, and the watchdog not fed, when there is work and no step has finished for so long",
        reloadable=True,
    )
    drain_timeout_s: float = option(
        30.0, number(0.0, 86_400.0, "SECONDS"), "how long SIGTERM waits for running sequences", reloadable=True
    )
    journal: str = option(
        "on",
        choice("on", "off", "sync"),
        "note accepted requests beside the socket, so that the next daemon takes them up; sync: on the disk, too",
    )
    journal_max_bytes: int = option(
        64 << 20, size(), "largest journal; half of it is for requests that are not finished", reloadable=True
    )
    state_directory: str = option(
        "auto",
        text("PATH"),
        "where snapshots of sequences are kept; auto: $STATE_DIRECTORY, else $XDG_STATE_HOME/kvpool",
    )
    max_snapshot_bytes: int = option(4 << 30, size(), "snapshots that one user may store", reloadable=True)
    resume_grace_s: float = option(
        60.0,
        number(1.0, 86_400.0, "SECONDS"),
        "how long requests of an earlier daemon, and what is finished, wait for a client to come back",
        reloadable=True,
    )
    socket_mode: int = option(0o660, MODE, "permissions of the sockets")
    socket_group: str = option("", text("GROUP"), "group of the sockets; empty: the daemon's own")
    admin_group: str = option(
        "", text("GROUP"), "members may drain, reload, resize and cancel for others", reloadable=True
    )
    tcp_address: str = option(
        "",
        TCP,
        "where clients of other machines connect, beside the Unix socket; without keys only on 127.0.0.1 or [::1]",
    )
    server_key_file: str = option(
        "", text("PATH"), "the daemon's own keys for tcp_address, made by kvpool keygen; only its user may read them"
    )
    authorised_keys: str = option(
        "", text("PATH"), "who may come over tcp_address: lines of NAME USER PUBLIC-KEY [admin]; read again at a reload"
    )
    remote_timeout_s: float = option(
        30.0,
        number(0.5, 3600.0, "SECONDS"),
        "a client of another machine that answers no heartbeat for so long is gone",
    )
    metrics_address: str = option(
        "",
        LISTEN,
        "where Prometheus reads the figures (/metrics) and probes the health (/health); empty: nowhere",
    )
    log_level: str = option(
        "info", choice("debug", "info", "warning", "error"), "least severe line that is logged", reloadable=True
    )
    log_format: str = option(
        "auto", choice("auto", "plain", "json"), "how log lines look; auto: plain on a terminal, else json"
    )

    defaults: UserLimits = UserLimits()
    users: Mapping[int, UserLimits] = field(default_factory=dict)  # by uid

    def limits_of(self, uid: int) -> UserLimits:
        return self.users.get(uid, self.defaults)

    def scheduler_limits(self, max_model_len: int) -> SchedulerLimits:
        """What the scheduler is to obey."""
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_queued=self.max_queued_requests,
            ageing_s=self.ageing_s,
            defaults=OwnerLimits(**asdict(self.defaults)),
            owners={uid: OwnerLimits(**asdict(limits)) for uid, limits in self.users.items()},
        )

    def changed(self, other: Config) -> tuple[list[str], list[str]]:
        """Names in which `other` differs: those that a reload can apply, and those that need a restart."""
        rows = {row.name: row.reloadable for row in options(self)} | {"defaults": True, "users": True}
        differing = [name for name in rows if getattr(self, name) != getattr(other, name)]
        return [name for name in differing if rows[name]], [name for name in differing if not rows[name]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per row; values are checked later, by the same code that checks the file."""
    group = parser.add_argument_group("settings")
    for row in options(Config):
        default = row.kind.show(row.default).strip('"') or "none"
        group.add_argument(
            row.flag,
            metavar=row.kind.metavar,
            dest=row.name,
            help=f"{row.help} (default: {default})".replace("%", "%%"),
        )


def load(flags: Mapping[str, str | None], environ: Mapping[str, str], path: Path | None) -> Config:
    """The configuration in force. Raises ConfigError for the first thing that cannot be used."""
    rows = {row.name: row for row in options(Config)}
    values: dict[str, Any] = _from_file(path, rows) if path else {}
    for name, value in environ.items():
        if name.startswith("KVPOOL_") and name not in FOREIGN_ENVIRONMENT:
            row = rows.get(name.removeprefix("KVPOOL_").lower())
            if row is None or name != row.environment:
                raise ConfigError(f"{name}: no such setting{_nearest(name, [r.environment for r in rows.values()])}")
            values[row.name] = _parse(row, value, row.environment)
    for name, flag in flags.items():
        if flag is not None:
            values[name] = _parse(rows[name], flag, rows[name].flag)
    config = Config(**values)
    _check_together(config)
    return config


def find_file(flag: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file that was asked for, else `kvpool.toml` in systemd's configuration directory if there is one."""
    asked = flag or environ.get("KVPOOL_CONFIG")
    if asked:
        return Path(asked)
    directory = environ.get("CONFIGURATION_DIRECTORY")
    found = Path(directory) / "kvpool.toml" if directory else None
    return found if found and found.exists() else None


def show(config: Config) -> str:
    """The configuration as a TOML file that reads back as the same configuration, with the help as comments."""
    lines = []
    for row in options(config):
        lines += [f"# {row.help} ({row.kind.allowed})", f"{row.name} = {row.kind.show(getattr(config, row.name))}", ""]
    lines += ["[defaults]", *_show_limits(config.defaults)]
    for uid, limits in config.users.items():
        lines += ["", f"[users.{quote(str(uid))}]", *_show_limits(limits)]
    return "\n".join(lines) + "\n"


_PREFACE = """# Configuration

Every setting can be given as a flag (`--max-num-seqs 8`), in the environment (`KVPOOL_MAX_NUM_SEQS=8`) or in the TOML
file named by `--config` (`max_num_seqs = 8`); the first of these that names it wins. `kvpoold --print-config` shows
what is in force, `kvpoold --check-config` only checks. Settings marked reloadable follow SIGHUP and `kvpool reload`.
`[defaults]` holds for every user, `[users.NAME]` or `[users.UID]` for one.
"""


def reference() -> str:
    """The table as Markdown: docs/configuration.md."""
    lines = [_PREFACE, "| setting | values | default | meaning |", "|---|---|---|---|"]
    lines += [_reference_line(row, row.name) for row in options(Config)]
    lines += [_reference_line(row, f"[defaults] {row.name}") for row in options(UserLimits)]
    return "\n".join(lines) + "\n"


def _reference_line(row: Option, name: str) -> str:
    note = " *Reloadable.*" if row.reloadable else ""
    default = row.kind.show(row.default)
    return f"| `{name}` | {row.kind.allowed} | `{default}` | {row.help}.{note} |".replace("*|*", "")


def _show_limits(limits: UserLimits) -> list[str]:
    return [f"{row.name} = {row.kind.show(getattr(limits, row.name))}" for row in options(limits)]


def _from_file(path: Path, rows: Mapping[str, Option]) -> dict[str, Any]:
    try:
        source = path.read_bytes().decode()
        tables = tomllib.loads(source)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give --config a file that can be read") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    where = _Lines(path, source)
    users = tables.pop("users", {})
    defaults = tables.pop("defaults", {})
    values = _parse_table(tables, rows, where, ())
    limit_rows = {row.name: row for row in options(UserLimits)}
    values["defaults"] = UserLimits(
        **_parse_table(_table(defaults, where, "defaults"), limit_rows, where, ("defaults",))
    )
    values["users"] = {}
    for name, table in _table(users, where, "users").items():
        uid = _uid(name, where)
        limits = _parse_table(_table(table, where, "users", name), limit_rows, where, ("users", name))
        values["users"][uid] = replace(values["defaults"], **limits)
    return values


def _table(value: object, where: _Lines, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where.of(*keys)}: {'.'.join(keys)}: write it as a table, [{'.'.join(keys)}]")
    return value


def _parse_table(
    table: Mapping[str, object], rows: Mapping[str, Option], where: _Lines, prefix: tuple[str, ...]
) -> dict[str, Any]:
    values = {}
    for name, value in table.items():
        if name not in rows:
            known = [*rows, "users", "defaults"] if not prefix else list(rows)
            raise ConfigError(f"{where.of(*prefix, name)}: {name}: no such setting{_nearest(name, known)}")
        values[name] = _parse(rows[name], value, f"{where.of(*prefix, name)}: {name}")
    return values


def _parse(row: Option, value: object, where: str) -> object:
    try:
        return row.kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} cannot be used; {error}") from None


def _uid(name: str, where: _Lines) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(
            f"{where.of('users', name)}: users.{name}: no such user; set a name or a uid that exists"
        ) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "; kvpoold --print-config shows them all"


def _check_together(config: Config) -> None:
    if config.max_num_seqs > config.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs {config.max_num_seqs} is more than max_num_batched_tokens {config.max_num_batched_tokens}: "
            f"every running sequence needs a token per step; raise max_num_batched_tokens or lower max_num_seqs"
        )
    if not 4096 <= config.max_message_bytes <= 1 << 30:
        raise ConfigError(f"max_message_bytes {config.max_message_bytes} cannot be used; set it from 4KiB to 1GiB")
    if config.journal_max_bytes < MIN_JOURNAL_BYTES:
        raise ConfigError(
            f"journal_max_bytes {config.journal_max_bytes} cannot be used; set it to 1MiB or more, or journal to off"
        )
    if config.address.startswith("tcp://"):
        raise ConfigError("address: set the path of a Unix socket here, and tcp_address for other machines")
    if bool(config.server_key_file) != bool(config.authorised_keys):
        missing = "authorised_keys" if config.server_key_file else "server_key_file"
        raise ConfigError(f"{missing}: is needed together with the other; set both, or none")
    tcp = parse_tcp(config.tcp_address)
    if tcp is not None and tcp[0] not in LOOPBACK_HOSTS and not config.authorised_keys:
        raise ConfigError(
            f"tcp_address: {config.tcp_address} can be reached from other machines, so it needs keys; "
            f"set server_key_file and authorised_keys"
        )


@dataclass(frozen=True, slots=True)
class _Lines:
    """Finds the line on which a key of a TOML file stands (the standard parser does not keep it)."""

    path: Path
    source: str

    def of(self, *keys: str) -> str:
        """ "file:line" of a dotted key, or of its table where the key itself cannot be found."""
        best, best_depth = 0, -1
        table: tuple[str, ...] = ()
        for position, line in enumerate(self.source.splitlines(), start=1):
            header = re.match(r"\s*\[+([^\]]+)\]", line)
            assigned = re.match(
                r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=", line
            )
            if header:
                table = found = _split_key(header[1])
            elif assigned:
                found = table + _split_key(assigned[1])
            else:
                continue
            if found == keys[: len(found)] and len(found) > best_depth:
                best, best_depth = position, len(found)
        return f"{self.path}:{best}" if best else str(self.path)


def _split_key(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted.strip()))
