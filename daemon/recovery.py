"""Taking up what an earlier daemon left in its journal.

A request that is taken up has the tokens that were given out, and none of them computed: the scheduler computes them
together, as it does after a preemption. Text, stop strings, penalties and randomness depend on the tokens alone, so it
goes on with the same bits as if nothing had happened. It waits for its owner as a request does that lingers.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ..client.errors import KVPoolError
from .clients import Clients
from .config import Config
from .journal import Identity, Journal
from .journal_records import KnownRequest
from .submission import make_request

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
    for known in found.requests.values():
        try:
            _take_up(known, clients)
        except KVPoolError as error:
            log.error("request %s cannot be taken up: %s", known.accept.submit.request_id, error)
    clients.expect_owners_of_set_aside(found.set_aside)
    if found.requests:
        unfinished = sum(not known.done for known in found.requests.values())
        log.info("took up %d requests of the last daemon, %d to finish", len(found.requests), unfinished)


def _take_up(known: KnownRequest, clients: Clients) -> None:
    accept = known.accept
    request = make_request(accept.submit, clients.text, accept.uid, accept.arrival, seed=accept.seed)
    clients.engine.take_up(request, known)
    if request.keep and not request.done:
        clients.keep_sequence(request)
    clients.expect_owner(request)
