"""Taking up what an earlier daemon left in its journal.

A request that is taken up has the tokens that were given out, and none of them computed: the scheduler computes them
together, as it does after a preemption. Text, stop strings, penalties and randomness depend on the tokens alone, so it
goes on with the same bits as if nothing had happened. It waits for its owner as a request does that lingers. A kept
sequence is there again, idle, with nothing computed, or with the request that was at work on it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ...client.wire.errors import KVPoolError
from ..engine.request import Request
from ..engine.submission import make_request
from ..persistence.journal import Identity, Journal
from ..persistence.journal_records import KnownRequest
from ..settings.config import Config
from .clients import Clients

log = logging.getLogger(__name__)

JOURNAL_SUFFIX = ".journal"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def make_journal(config: Config, socket_path: Path, identity: Identity) -> Journal | None:
    """The journal that the settings ask for, beside the socket (whose lock keeps other daemons away); None: none."""
    if config.journal == "off":
        return None
    return Journal(
        socket_path.with_name(socket_path.name + JOURNAL_SUFFIX),
        identity,
        max_bytes=config.journal_max_bytes,
        grace_s=config.resume_grace_s,
        boot_id=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
        sync=config.journal == "sync",
    )


def take_up_all(journal: Journal, clients: Clients) -> None:
    """Begin where the last daemon stopped."""
    found = journal.recover(clients.now, time.time())
    at_work: dict[tuple[int, str], Request] = {}  # on the kept sequence of this user and name
    for known in found.requests.values():
        try:
            request = _take_up(known, clients)
        except KVPoolError as error:
            log.error("request %s cannot be taken up: %s", known.accept.submit.request_id, error)
        else:
            if request.kept_as and not request.done:
                at_work[request.uid, request.kept_as] = request
    for held in found.held.values():
        try:
            clients.sequences.take_up(held, at_work.pop((held.uid, held.name), None), clients.now)
        except KVPoolError as error:
            log.error("sequence %r of uid %d cannot be taken up: %s", held.name, held.uid, error)
            journal.let_go(held.key)
    for request in at_work.values():
        clients.keep_sequence(request)
    clients.expect_owners_of_set_aside(found.set_aside)
    if found.requests or found.held:
        unfinished = sum(not known.done for known in found.requests.values())
        log.info("took up %d requests of the last daemon, %d to finish", len(found.requests), unfinished)
        log.info("took up %d sequences of the last daemon", len(found.held))


def _take_up(known: KnownRequest, clients: Clients) -> Request:
    accept = known.accept
    request = make_request(accept.submit, clients.text, accept.uid, accept.arrival, seed=accept.seed)
    request.kept_as = accept.sequence
    request.keep = bool(accept.sequence)
    clients.engine.take_up(request, known)
    clients.expect_owner(request)
    return request
