"""The messages about sequences: each checked, obeyed at once, and answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...client.wire.errors import ShuttingDown
from ...client.wire.protocol import (
    Append,
    AttachSequence,
    CloseSequence,
    Fork,
    Generate,
    OpenSequence,
    Reply,
    Share,
    Submit,
    Truncate,
    pack_token_ids,
)
from .sequence_objects import SequenceObject
from .sessions import Session

if TYPE_CHECKING:
    from .clients import Clients


class SequenceService:
    """Handlers by kind of message, for `Clients`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._objects = clients.sequences
        self.handlers: dict[type[Any], Callable[[Session, Any], None]] = {
            OpenSequence: self._open,
            AttachSequence: self._attach,
            Append: self._append,
            Generate: self._generate,
            Fork: self._fork,
            Truncate: self._truncate,
            Share: self._share,
            CloseSequence: self._close,
        }

    def _open(self, session: Session, message: OpenSequence) -> None:
        self._require_service()
        nothing = message.prompt is None and message.messages is None
        token_ids = self._clients.text.prompt_ids("" if nothing else message.prompt, message.messages)
        made = self._objects.open(message.sequence_id, session, token_ids, keep=message.keep, linger_s=message.linger_s)
        made.created_at = self._clients.now
        self._answer(session, message.call_id, made)

    def _attach(self, session: Session, message: AttachSequence) -> None:
        self._answer(session, message.call_id, self._objects.readable(session, message.sequence_id))

    def _append(self, session: Session, message: Append) -> None:
        found = self._objects.own(session, message.sequence_id)
        text = self._clients.text
        self._objects.append(found, text.continuation_ids(message.prompt, message.messages, found.sequence.token_ids))
        self._answer(session, message.call_id, found)

    def _generate(self, session: Session, message: Generate) -> None:
        """As if all its tokens were the prompt of a Submit."""
        found = self._objects.own(session, message.sequence_id)
        submit = Submit(
            message.request_id,
            prompt=pack_token_ids(found.sequence.token_ids),
            params=message.params,
            priority=message.priority,
            deadline_s=message.deadline_s,
            credit=message.credit,
            want_text=message.want_text,
            handle=message.handle,
        )
        self._clients.begin(session, submit, lambda request: self._objects.generate(found, request))

    def _fork(self, session: Session, message: Fork) -> None:
        self._require_service()
        parent = self._objects.readable(session, message.sequence_id)
        child = self._objects.fork(parent, message.new_sequence_id, session, message.at)
        child.created_at = self._clients.now
        self._answer(session, message.call_id, child)

    def _truncate(self, session: Session, message: Truncate) -> None:
        found = self._objects.own(session, message.sequence_id)
        self._objects.truncate(found, message.num_tokens)
        self._answer(session, message.call_id, found)

    def _share(self, session: Session, message: Share) -> None:
        found = self._objects.own(session, message.sequence_id)
        self._objects.share(found, message.uid, message.gid)
        self._answer(session, message.call_id, found)

    def _close(self, session: Session, message: CloseSequence) -> None:
        found = self._objects.own(session, message.sequence_id)
        self._objects.close(found)
        self._answer(session, message.call_id, found)

    def _require_service(self) -> None:
        if self._clients.draining:
            raise ShuttingDown("the daemon shuts down and takes no new work")

    def _answer(self, session: Session, call_id: int, found: SequenceObject) -> None:
        value = {"num_tokens": found.sequence.num_tokens}
        self._clients.send(session, Reply(self._clients.engine.epoch, call_id, value))
