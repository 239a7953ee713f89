"""Histories for journal tests: what happens to requests, told to a journal and to a plain dictionary alike."""

from __future__ import annotations

from pathlib import Path

from kvpool.client.wire.protocol import Finished, Submit, Usage, pack_token_ids
from kvpool.daemon.persistence.journal import Found, Journal
from kvpool.daemon.persistence.journal_records import Accept, KnownRequest, KnownSample

IDENTITY = {"model": "tiny", "dtype": "float32", "block_size": 16}
GRACE_S = 60.0

State = dict[int, KnownRequest]


def open_journal(
    path: Path, *, max_bytes: int = 1 << 20, identity: dict[str, str | int] | None = None, boot_id: str = "boot"
) -> Journal:
    return Journal(path, identity or dict(IDENTITY), max_bytes=max_bytes, grace_s=GRACE_S, boot_id=boot_id)


def recovered(path: Path, now: float = 0.0) -> tuple[Journal, Found]:
    journal = open_journal(path)
    return journal, journal.recover(now, wall=now)


class History:
    """A journal, and what a reader of its file must find: `written` after the last commit, `said` after the next."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.said: State = {}
        self.written: State = {}
        self.now = 0.0
        self._ended: list[int] = []
        self._finished_at: dict[int, float] = {}

    def accept(self, prompt: list[int], n: int = 1, uid: int = 1000) -> int:
        submit = Submit(f"r{self.journal._next_key}", prompt=pack_token_ids(prompt), params={"n": n})
        key = self.journal.accept(uid, submit, n, seed=2**64 - 1, arrival=self.now, wall=self.now)
        accept = Accept(key, uid, submit, n, 2**64 - 1, self.now, self.now)
        self.said[key] = KnownRequest(accept, [KnownSample() for _ in range(n)])
        self._committed()
        return key

    def tokens(self, key: int, sample: int, token_ids: list[int], *, logprobs: bool = False) -> None:
        known = self.said[key].samples[sample]
        own = tuple(-token_id / 7 for token_id in token_ids) if logprobs else ()
        top = tuple(((token_id, -0.1), (1, float("-inf"))) for token_id in token_ids) if logprobs else ()
        self.journal.tokens(key, sample, len(known.token_ids), tuple(token_ids), own, top)
        known.token_ids += token_ids
        known.logprobs += own
        known.top_logprobs += top

    def end(self, key: int, sample: int, reason: str = "stop") -> None:
        known = self.said[key]
        usage = Usage(1, len(known.samples[sample].token_ids))
        finished = Finished(7, known.accept.submit.request_id, sample, reason, usage, "tail")
        self.journal.end(key, finished)
        known.samples[sample].finished = finished
        if all(one.finished is not None for one in known.samples):
            self._ended.append(key)

    def commit(self) -> None:
        self.journal.commit(self.now)
        self._committed()

    def _committed(self) -> None:
        for key in self._ended:
            self._finished_at[key] = self.said[key].finished_at = self.now
        self._ended.clear()
        for key, since in list(self._finished_at.items()):
            if self.now - since >= GRACE_S:
                del self.said[key], self._finished_at[key]
        self.written = _copy(self.said)

    def restart(self, path: Path) -> None:
        """Die without a word, and come back."""
        self.journal._file.close()  # as the kernel does
        self.journal, found = recovered(path, self.now)
        self.said = found.requests
        self.written = _copy(self.said)
        self._ended = []
        self._finished_at = {
            key: known.finished_at for key, known in self.said.items() if known.finished_at is not None
        }


def _copy(state: State) -> State:
    return {
        key: KnownRequest(
            known.accept,
            [KnownSample([*s.token_ids], [*s.logprobs], [*s.top_logprobs], s.finished) for s in known.samples],
            known.finished_at,
        )
        for key, known in state.items()
    }


def after_restart(state: State, now: float) -> State:
    """What the next daemon finds: the last that was finished has been so since `now`, the others as long before it."""
    result = _copy(state)
    last = max((known.finished_at for known in result.values() if known.finished_at is not None), default=0.0)
    for known in result.values():
        if known.finished_at is not None:
            known.finished_at = now - (last - known.finished_at)
    return result
