"""kvpoold: puts the daemon together, serves, and takes it apart again. The only place where the parts meet."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

from .. import __version__
from ..client.arena import arena
from ..client.sampling_params import MAX_LOGPROBS, MAX_N
from ..client.wire.errors import InvalidArgument
from ..client.wire.protocol import ServerLimits
from ..model.backend import Backend, BackendLimits, Progress
from ..model.errors import ModelError
from ..model.loading import LoadedModel, load_model
from .engine.engine import DeviceLost, Engine
from .engine.metrics import Metrics
from .engine.step_runner import StepRunner
from .engine.text import Text
from .memory.block_pool import BlockPool
from .memory.prefix_cache import PrefixCache
from .memory.reservation import Reservation
from .persistence.journal import Journal
from .persistence.snapshot_file import Suitability
from .persistence.snapshots import SnapshotStore, state_directory
from .scheduling.scheduler import Scheduler
from .serving.arenas import layout_for
from .serving.calls import Calls
from .serving.clients import Clients
from .serving.endpoint import Endpoint, open_endpoint, socket_path
from .serving.keyring import ANYBODY, load_keyring
from .serving.recovery import make_journal, take_up_all
from .serving.remote import Remote
from .serving.scrapes import Page, Scrapes, health_page, open_listener
from .serving.server import Poller, Server, Signals
from .serving.sessions import Sessions
from .serving.snapshot_service import SnapshotService
from .serving.users import is_admin
from .settings import config as configuration
from .settings.config import Config
from .settings.idle import idle_settings
from .settings.options import ConfigError
from .system.background import Background
from .system.devices import chosen_device, device_backend, pool_head_start
from .system.ledger import CPU_AUTO_BYTES, CPU_AUTO_SHARE, CUDA_AUTO_SHARE, Ledger, plan_memory
from .system.logs import start_logging
from .system.service import Manager, inherited_fds
from .system.timers import Timers

log = logging.getLogger("kvpool.daemon")  # __name__ is "__main__" here, and would be nobody's child

MakeBackend = Callable[[Config, LoadedModel, BackendLimits, Progress], Backend]

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
PROGRESS_STEP = 0.1


def main(arguments: Sequence[str] | None = None, *, make_backend: MakeBackend | None = None) -> int:
    """The command line. Returns the exit status. `make_backend` stands in for the device that the settings ask for."""
    parser = argparse.ArgumentParser(
        prog="kvpoold",
        description="Serve one model from one paged KV cache to every process of this machine.",
        epilog="Each setting can also be KVPOOL_NAME in the environment, or a line of the configuration file. "
        "Sizes read 2GiB, 512MiB or bytes. SIGTERM drains, SIGHUP reloads.",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML)")
    parser.add_argument("--check-config", action="store_true", help="check the settings, and do nothing else")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force as a configuration file"
    )
    parser.add_argument("--version", action="version", version=f"kvpoold {__version__}")
    configuration.add_flags(parser)
    flags = vars(parser.parse_args(arguments))
    file = configuration.find_file(flags.pop("config"), os.environ)
    only_check, only_print = flags.pop("check_config"), flags.pop("print_config")
    try:
        config = configuration.load(flags, os.environ, file)
        if only_print:
            print(configuration.show(config), end="")
        if only_check:
            for line in idle_settings(config):
                print(f"kvpoold: {line}", file=sys.stderr)
        elif not only_print:
            serve(
                config,
                os.environ,
                load_again=lambda: configuration.load(flags, os.environ, file),
                make_backend=make_backend,
            )
    except (ConfigError, ModelError, MemoryError) as error:
        print(f"kvpoold: {error}", file=sys.stderr)
        return EXIT_USAGE if only_check or isinstance(error, ConfigError) else EXIT_FAILED
    except DeviceLost as error:
        print(f"kvpoold: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def serve(
    config: Config,
    environ: Mapping[str, str],
    *,
    load_again: Callable[[], Config],
    make_backend: MakeBackend | None = None,
) -> None:
    """Run a daemon until it is told to stop; what it made is gone afterwards, however it ends."""
    started = time.monotonic()
    start_logging(config.log_level, config.log_format)
    for line in idle_settings(config):
        log.warning("%s", line)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_starting)
    manager = Manager.from_environment(environ)
    _raise_descriptor_limit()
    with ExitStack() as stack:
        path = socket_path(config.address, environ)
        endpoint = open_endpoint(config, path, inherited_fds(environ))
        stack.callback(endpoint.close)
        make_backend = make_backend or partial(device_backend, head_start=pool_head_start(config))
        model, limits = _load_model(config, manager)
        backend = make_backend(config, model, limits, _reporter(manager))
        stack.callback(backend.close)
        ledger = _allocate(config, limits, backend)
        server = _assemble(config, environ, model, limits, ledger, backend, endpoint, manager, stack, load_again)
        log.info("%s", backend.description)
        log.info("ready after %.1f s: %s on %s", time.monotonic() - started, model.name, path)
        if endpoint.remote is not None:
            log.info("clients of other machines: %s", endpoint.remote.endpoint)
        gc.freeze()  # what was made by now stays: no collection need look at a vocabulary again
        gc.enable()
        manager.ready(f"serving {model.name} on {path}")
        server.run()
        log.info("stopped")


def _assemble(
    config: Config,
    environ: Mapping[str, str],
    model: LoadedModel,
    limits: BackendLimits,
    ledger: Ledger,
    backend: Backend,
    endpoint: Endpoint,
    manager: Manager,
    stack: ExitStack,
    load_again: Callable[[], Config],
) -> Server:
    pool = BlockPool(ledger.num_blocks, config.block_size)
    identity = [("model", model.model_hash), ("backend", backend.description)]
    cache = None
    if config.prefix_cache:
        cache = PrefixCache(pool, secret=secrets.token_bytes(32), identity=identity, ttl_s=config.prefix_ttl_s)
    scheduler = Scheduler(
        pool,
        limits=config.scheduler_limits(limits.max_model_len),
        prefix_cache=cache,
        reservation=cast(Reservation, config.reservation),  # one of its words: the table of settings checked it
        host_blocks=ledger.host_slots,
        window=_window(model),
        works_ahead=backend.works_ahead,
    )
    runner = StepRunner(backend, limits, costs=scheduler.costs)
    if ledger.host_slots:
        runner.measure_swap()
    same_bits: dict[str, str | int] = {
        "model": model.model_hash,
        "layout": backend.kv_layout,
        "block_size": config.block_size,
    }
    journal = make_journal(config, endpoint.path, same_bits)
    if journal is not None:
        stack.callback(journal.close)
    engine = Engine(scheduler, runner, Metrics(time.monotonic()), epoch=secrets.randbits(62), journal=journal)
    text = Text(
        model.tokenizer,
        model.chat_template,
        vocab_size=model.config.vocab_size,
        max_model_len=limits.max_model_len,
        num_layers=model.config.num_layers,
        hidden_size=model.config.hidden_size,
    )
    stack.callback(text.close)
    poller, timers, signals = Poller(), Timers(), Signals()
    stack.callback(poller.close)
    stack.callback(signals.close)
    layout = layout_for(vocab_size=model.config.vocab_size, max_model_len=limits.max_model_len)
    sessions = Sessions(poller.watch, poller.unwatch, layout if config.arena and arena.supported() else None)
    if sessions.capabilities:
        sessions.rings.load()
    stack.callback(sessions.hang_up_all)
    # After what was sent last has left, so that a client reads its end before it sees the lifeline hang up.
    stack.callback(endpoint.close)
    background = Background()
    stack.callback(background.close)
    store = SnapshotStore(
        state_directory(config.state_directory, environ),
        Suitability(
            model_hash=model.model_hash,
            kv_layout=backend.kv_layout,
            block_size=config.block_size,
            block_bytes=backend.block_bytes,
            vocab_size=model.config.vocab_size,
            max_model_len=limits.max_model_len,
        ),
    )
    reloader = Reloader(config, load_again, limits.max_model_len, scheduler, journal, endpoint.remote)
    clients = Clients(
        config,
        engine,
        text,
        sessions,
        timers,
        send=lambda routing_id, data: server.send(routing_id, data),
        calls=Calls(lambda: server.drain(), lambda: reloader.reload(), store),
        limits=ServerLimits(
            max_message_bytes=config.max_message_bytes,
            max_model_len=limits.max_model_len,
            vocab_size=model.config.vocab_size,
            block_size=config.block_size,
            num_blocks=pool.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_samples=MAX_N,
            max_logprobs=MAX_LOGPROBS,
        ),
        model_name=model.name,
        version=__version__,
    )
    reloader.clients = clients
    clients.handlers |= SnapshotService(clients, store, background).handlers
    if journal is not None:
        clients.now = time.monotonic()
        take_up_all(journal, clients)
    server = Server(
        endpoint,
        engine,
        clients,
        sessions,
        timers,
        poller,
        signals,
        manager,
        background,
        reload=reloader.reload_by_signal,
    )
    if config.metrics_address:
        server.scrapes = _open_scrapes(config, clients, timers, poller)
        stack.callback(server.scrapes.close)
    return server


def _open_scrapes(config: Config, clients: Clients, timers: Timers, poller: Poller) -> Scrapes:
    """Where Prometheus reads. What renders its text is imported here: it takes longer than the rest of a start."""
    from .serving.exposition import CONTENT_TYPE, Exposition

    text = {whole: Exposition(clients, __version__, with_users=whole) for whole in (False, True)}
    pages = {
        "/metrics": lambda is_admin: Page(200, CONTENT_TYPE, text[is_admin].render()),
        "/health": lambda is_admin: health_page(clients),
    }
    scrapes = Scrapes(
        open_listener(config),
        pages,
        timers,
        is_admin=lambda peer: is_admin(peer, clients.config.admin_group),
        watch=poller.watch,
        unwatch=poller.unwatch,
    )
    log.info("figures at %s", config.metrics_address)
    return scrapes


class Reloader:
    """Applies a changed configuration to a running daemon: all of it, or nothing."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        max_model_len: int,
        scheduler: Scheduler,
        journal: Journal | None,
        remote: Remote | None,
    ) -> None:
        self._config = config
        self._load = load
        self._max_model_len = max_model_len
        self._scheduler = scheduler
        self._journal = journal
        self._remote = remote
        self.clients: Clients | None = None

    def reload(self) -> list[str]:
        """The names of the settings that changed. Raises InvalidArgument, with nothing changed."""
        try:
            new = self._load()
            keyring = load_keyring(new) if self._remote is not None else None
        except ConfigError as error:
            raise InvalidArgument(f"{error}; nothing was changed") from None
        changed, fixed = self._config.changed(new)
        if fixed:
            raise InvalidArgument(f"{', '.join(fixed)} can only change with a restart; nothing was changed")
        self._scheduler.set_limits(new.scheduler_limits(self._max_model_len))
        if self._journal is not None:
            self._journal.max_bytes, self._journal.grace_s = new.journal_max_bytes, new.resume_grace_s
        start_logging(new.log_level, new.log_format)
        self._config = new
        if self.clients is not None:
            self.clients.config = new
        if self._remote is not None and keyring is not None and self.clients is not None:
            self._remote.keyring = replace(self._remote.keyring, users=keyring.users)
            for session in self.clients.sessions:
                if session.peer.remote not in (None, ANYBODY, *keyring.users.values()):
                    log.info("session %s: its key is no longer authorised as it was", session.session_id)
                    self.clients.close(session, "key_revoked")
        log.info("reloaded: %s", ", ".join(changed) or "nothing changed")
        return changed

    def reload_by_signal(self) -> None:
        try:
            self.reload()
        except InvalidArgument as error:
            log.error("reload: %s", error)


def _load_model(config: Config, manager: Manager) -> tuple[LoadedModel, BackendLimits]:
    if not config.model:
        raise ConfigError(
            "model: nothing to serve; set model to a directory, a .gguf file or the name of a pulled model"
        )
    manager.status(f"loading {config.model}")
    model = load_model(config.model)
    trained_for = model.config.max_position_embeddings
    max_model_len = config.max_model_len or trained_for
    if max_model_len > trained_for:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {trained_for} that {model.name} was trained for"
        )
    return model, BackendLimits(config.block_size, config.max_num_seqs, config.max_num_batched_tokens, max_model_len)


def _allocate(config: Config, limits: BackendLimits, backend: Backend) -> Ledger:
    on_card = chosen_device(config) == "cuda"
    ledger = plan_memory(
        config,
        weights_bytes=backend.weights_bytes,
        workspace_bytes=backend.workspace_bytes,
        block_bytes=backend.block_bytes,
        available_bytes=backend.available_bytes(),
        max_model_len=limits.max_model_len,
        auto_share=CUDA_AUTO_SHARE if on_card else CPU_AUTO_SHARE,
        auto_bytes=None if on_card else CPU_AUTO_BYTES,
        host_apart=on_card,
    )
    for line in ledger.lines():
        log.info("%s", line)
    backend.allocate_pool(ledger.num_blocks)
    if ledger.host_slots:
        backend.allocate_host(ledger.host_slots)
    return ledger


def _window(model: LoadedModel) -> int:
    """Tokens that the layer which looks back furthest sees; 0: everything."""
    windows = [model.config.window(layer) for layer in range(model.config.num_layers)]
    return 0 if 0 in windows else max(windows)


def _reporter(manager: Manager) -> Progress:
    """Tells people and the manager how far a long start is, each tenth once."""
    last_what, last_share = "", 0.0

    def report(what: str, share: float) -> None:
        nonlocal last_what, last_share
        if what != last_what or share >= last_share + PROGRESS_STEP:
            last_what, last_share = what, share
            log.info("%s %3.0f %%", what, 100 * share)
            manager.status(f"{what} {100 * share:.0f} %")

    return report


def _stop_starting(number: int, frame: object) -> None:
    """A signal before the loop runs: leave at once, and tidy up on the way."""
    raise SystemExit(128 + number)


def _raise_descriptor_limit() -> None:
    """Every client costs two descriptors; the usual soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536) if hard > 0 else 65_536, hard))


if __name__ == "__main__":
    sys.exit(main())
