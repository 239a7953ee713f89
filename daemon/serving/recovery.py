"""Taking up what an earlier daemon left in its journal.

A request that is taken up has the tokens that were given out, and none of them computed: the scheduler computes them
together, as it does after a preemption. Text, stop strings, penalties and randomness depend on the tokens alone, so it
goes on with the same bits as if nothing had happened. It waits for its owner as a request does that lingers. A kept
sequence is there again, idle, with nothing computed, or with the request that was at work on it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
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
AMBIGUOUS = "several requests of this user were under way with the same request_id"
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
    under_way = Counter(_name(known) for known in found.requests.values() if not known.done)
    for known in found.requests.values():
        try:
            request = _take_up(known, clients, namesakes=under_way[_name(known)] - (not known.done))
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
    ambiguous = dict.fromkeys((name for name, count in under_way.items() if count > 1), AMBIGUOUS)
    clients.expect_owners_of_set_aside({**found.set_aside, **ambiguous})
    if found.requests or found.held:
        unfinished = sum(not known.done for known in found.requests.values())
        log.info("took up %d requests of the last daemon, %d to finish", len(found.requests), unfinished)
        log.info("took up %d sequences of the last daemon", len(found.held))


def _name(known: KnownRequest) -> tuple[int, str]:
    return known.accept.uid, known.accept.submit.request_id


def _take_up(known: KnownRequest, clients: Clients, *, namesakes: int) -> Request:
    """`namesakes`: how many others of this user and name were under way. Who comes for one of several would get tokens
    of another, so none of them goes on; who comes for the only one is not given what is over."""
    accept = known.accept
    request = make_request(accept.submit, clients.text, accept.uid, accept.arrival, seed=accept.seed)
    request.kept_as = accept.sequence
    request.keep = bool(accept.sequence)
    clients.engine.take_up(request, known)
    if not namesakes:
        clients.expect_owner(request)
    elif not request.done:
        log.warning("request %s of uid %d does not go on: %s", request.request_id, request.uid, AMBIGUOUS)
        clients.engine.cancel(request)
    return request
