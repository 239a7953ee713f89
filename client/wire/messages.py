"""Every message of the wire, as a record: what its fields are called, their types and their ranges.

PROTOCOL.md says who sends what, when and why; this module is its table. A field with a default may be left out on the
wire. `request_id` names a request among those of one user; `sample` counts the n sequences of a request from 0;
`index` counts the generated tokens of a sample from 0. Every message of the daemon carries its `epoch`, a number that
is another one after a restart.

Long because it is one table, of all messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from .schema import Binary, Blob, Choice, Integer, Many, Name, Optional, Pair, Plain, PlainMap, Real, Text
from .token_ids import PackedTokenIds
from .token_ids import Prompt as PromptSpec

PROTOCOL_VERSION = 2
SUPPORTED_VERSIONS = (PROTOCOL_VERSION, 1)
"""Best first. What version 1 has, version 2 has unchanged; its peers ask for nothing that came later."""

HIDDEN_LAYERS_SINCE = 2  # `hidden_layers` of Submit, `layers` of Rows

# What the wire can say at most; a daemon's own limits are usually lower and come in Welcome.
MAX_PROMPT_TOKENS = 2**24
MAX_PROMPT_BYTES = 2**26
MAX_CHAT_MESSAGES = 1024
MAX_SAMPLES = 1024
MAX_TOKENS_PER_EVENT = 4096
MAX_EVENTS_PER_MESSAGE = 65536
MAX_TOP_LOGPROBS = 1024
MAX_CREDIT = 2**31 - 1
MAX_PRIORITY = 100
MAX_HIDDEN_LAYERS = 64
MAX_LAYERS = 4096  # of any model
MAX_DEADLINE_S = 30 * 86400.0
MAX_LINGER_S = 7 * 86400.0
LIFELINE_TOKEN_BYTES = 32

ROLES = ("system", "developer", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length", "cancelled", "deadline", "error")
POOLINGS = ("mean", "last")
LAYER_KINDS = ("prompt_hidden", "hidden")  # of ROW_KINDS, those with several rows for each token
ROW_KINDS = {
    "logits": "<f4",  # (count, vocab_size), of the sample's tokens from `index` on; before these
    "prompt_logprobs": "<f4",  # (count,), of the prompt's tokens from `index` on
    "prompt_top_token_ids": "<i4",  # (count, candidates), best first
    "prompt_top_logprobs": "<f4",  # (count, candidates)
    "embedding": "<f4",  # (1, hidden_size)
    "prompt_hidden": "<f4",  # (count, layers, hidden_size), of the prompt's tokens from `index` on
    "hidden": "<f4",  # the same, what the sample's tokens from `index` on are drawn from; before these
}
MAX_ROWS_BYTES = 2**30
NOTICE_KINDS = ("paused", "resumed", "preempted")
CLOSING_REASONS = ("shutting_down", "protocol_error", "replaced", "lifeline_lost", "key_revoked")

Epoch = Annotated[int, Integer(0, 2**63 - 1)]
RequestId = Annotated[str, Name(max_bytes=128)]
SequenceId = Annotated[str, Name(max_bytes=128)]
SnapshotName = Annotated[str, Name(max_bytes=128)]
CallId = Annotated[int, Integer(0, 2**63 - 1)]
Sample = Annotated[int, Integer(0, MAX_SAMPLES - 1)]
Index = Annotated[int, Integer(0, 2**31 - 1)]
Count = Annotated[int, Integer(0, 2**63 - 1)]
UserId = Annotated[int, Integer(0, 2**32 - 1)]
TokenId = Annotated[int, Integer(0, 2**31 - 1)]
Logprob = Annotated[float, Real(float("-inf"), 1e-3)]  # natural log; a little above 0 by rounding
Priority = Annotated[int, Integer(-MAX_PRIORITY, MAX_PRIORITY)]
DeadlineS = Annotated[float, Real(0.0, MAX_DEADLINE_S)]
LingerS = Annotated[float, Real(0.0, MAX_LINGER_S)]
Handle = Annotated[int, Integer(0, 2**32 - 1)]
CreditAmount = Annotated[int, Integer(0, MAX_CREDIT)]
Prompt = Annotated[str | bytes, PromptSpec(Text(MAX_PROMPT_BYTES), PackedTokenIds(MAX_PROMPT_TOKENS))]
Params = Annotated[Mapping[str, Any], PlainMap(max_depth=4)]  # SamplingParams.to_wire(), checked by its from_wire
Capabilities = Annotated[tuple[Annotated[str, Name(max_bytes=32)], ...], Many(32)]
ErrorCode = Annotated[str, Name(max_bytes=64)]
ErrorText = Annotated[str, Text(max_bytes=4096)]
FieldName = Annotated[str, Text(max_bytes=256)]
RetryAfterMs = Annotated[int, Integer(0, 86_400_000)]


# ---- parts of messages


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, for the model's chat template."""

    role: Annotated[str, Choice(ROLES)]
    content: Annotated[str, Text(MAX_PROMPT_BYTES)]


ChatMessages = Annotated[tuple[ChatMessage, ...], Many(MAX_CHAT_MESSAGES, min_items=1)]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What this daemon takes, so that a client refuses at home what would be refused anyway."""

    max_message_bytes: Count
    max_model_len: Count
    vocab_size: Count
    block_size: Count
    num_blocks: Count
    max_num_seqs: Count
    max_samples: Count = MAX_SAMPLES
    max_logprobs: Count = MAX_TOP_LOGPROBS


@dataclass(slots=True)  # not frozen: one is made for every token, and that would take five times as long
class TokenBatch:
    """New tokens of one sample, in order. `texts[i]` is what token i added to the text (often "" while a character or a
    possible stop string is incomplete); `texts`, `logprobs`, `top_logprobs` are empty or as long as `token_ids`."""

    request_id: RequestId
    sample: Sample
    index: Index  # of token_ids[0]
    token_ids: Annotated[tuple[TokenId, ...], Many(MAX_TOKENS_PER_EVENT)]
    texts: Annotated[tuple[Annotated[str, Text(65536)], ...], Many(MAX_TOKENS_PER_EVENT)] = ()
    logprobs: Annotated[tuple[Logprob, ...], Many(MAX_TOKENS_PER_EVENT)] = ()
    top_logprobs: Annotated[
        tuple[Annotated[tuple[tuple[TokenId, Logprob], ...], Many(MAX_TOP_LOGPROBS)], ...], Many(MAX_TOKENS_PER_EVENT)
    ] = ()  # per token, best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sample; `cached_tokens` of the prompt's came from the prefix cache."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a sequence ended with finish_reason `error`."""

    code: ErrorCode
    message: ErrorText
    field: FieldName | None = None
    retry_after_ms: RetryAfterMs | None = None


# ---- client to daemon: sessions and streams


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection. `versions` are the protocol versions the client speaks, best first."""

    versions: Annotated[tuple[Annotated[int, Integer(1, 2**31 - 1)], ...], Many(16, min_items=1)]
    client_name: Annotated[str, Name(max_bytes=64, min_bytes=0)] = ""
    pid: Annotated[int, Integer(0, 2**31 - 1)] = 0  # shown to people; identity comes from the kernel
    capabilities: Capabilities = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request: exactly one of `prompt`, `messages` and `upload`, which says where in the arena's upload region
    packed ids lie: byte offset, number of ids. `credit` is how many tokens of each sample may come before more is
    granted; None: all of them."""

    request_id: RequestId
    prompt: Prompt | None = None
    messages: ChatMessages | None = None
    params: Params | None = None
    priority: Priority = 0
    deadline_s: DeadlineS | None = None  # from arrival; None: no deadline
    credit: CreditAmount | None = None
    want_text: bool = True
    keep: bool = False  # the sequence stays after its answer, under the request's id
    linger_s: LingerS = 0.0  # how long the request lives on when this connection is lost
    upload: Annotated[tuple[int, int] | None, Optional(Pair(Integer(0, 2**30), Integer(0, MAX_PROMPT_TOKENS)))] = None
    handle: Handle | None = None  # its tokens may come through the arena's ring under this number
    want_logits: bool = False  # the raw logits each token was drawn from come, too: only through an arena
    pooling: Annotated[str | None, Optional(Choice(POOLINGS))] = None  # only an embedding of the prompt; max_tokens 0
    hidden_layers: Annotated[
        tuple[Annotated[int, Integer(-MAX_LAYERS, MAX_LAYERS - 1)], ...], Many(MAX_HIDDEN_LAYERS)
    ] = ()  # whose outputs come for every token of prompt and answer; counted from 0, -1 is the last


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request of this session. Nothing is answered but the request's own Finished."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Credit:
    """Allow `amount` more tokens of one sample, or (None) of each."""

    request_id: RequestId
    amount: Annotated[int, Integer(1, MAX_CREDIT)]
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Attach:
    """Take a running request over into this session; `have[s]` is the index of the next token wanted of sample s."""

    request_id: RequestId
    have: Annotated[tuple[Index, ...], Many(MAX_SAMPLES)] = ()
    credit: CreditAmount | None = None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The client leaves: its requests are cancelled unless they linger."""


# ---- client to daemon: calls and sequences, each answered by one Reply or Failed with its call_id


@dataclass(frozen=True, slots=True)
class Call:
    """Ask for `method` (PROTOCOL.md lists them with their arguments and values)."""

    call_id: CallId
    method: Annotated[str, Name(max_bytes=64)]
    arguments: Annotated[Mapping[str, Any], PlainMap()] | None = None


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Make a sequence from a prompt or messages, or empty (from the model's beginning-of-sequence token)."""

    call_id: CallId
    sequence_id: SequenceId
    prompt: Prompt | None = None
    messages: ChatMessages | None = None
    keep: bool = False  # it outlives the session that opened it
    linger_s: LingerS = 0.0


@dataclass(frozen=True, slots=True)
class AttachSequence:
    """Use a sequence that another process of the same user (or one it was shared with) made."""

    call_id: CallId
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class Append:
    call_id: CallId
    sequence_id: SequenceId
    prompt: Prompt | None = None
    messages: ChatMessages | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    """Go on from the end of a sequence; answered as Submit is."""

    request_id: RequestId
    sequence_id: SequenceId
    params: Params | None = None
    priority: Priority = 0
    deadline_s: DeadlineS | None = None
    credit: CreditAmount | None = None
    want_text: bool = True
    handle: Handle | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Make `new_sequence_id` from the first `at` tokens (None: all), sharing their blocks."""

    call_id: CallId
    sequence_id: SequenceId
    new_sequence_id: SequenceId
    at: Index | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep the first `num_tokens` tokens."""

    call_id: CallId
    sequence_id: SequenceId
    num_tokens: Index


@dataclass(frozen=True, slots=True)
class Save:
    call_id: CallId
    sequence_id: SequenceId
    name: SnapshotName


@dataclass(frozen=True, slots=True)
class Restore:
    call_id: CallId
    sequence_id: SequenceId
    name: SnapshotName


@dataclass(frozen=True, slots=True)
class ReadKV:
    """Ask for the keys and values of the sequence's computed tokens from position `begin` on, as many as fit."""

    call_id: CallId
    sequence_id: SequenceId
    begin: Index = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Let another user, or a group, attach to and fork the sequence: exactly one of `uid` and `gid`."""

    call_id: CallId
    sequence_id: SequenceId
    uid: UserId | None = None
    gid: UserId | None = None


@dataclass(frozen=True, slots=True)
class CloseSequence:
    call_id: CallId
    sequence_id: SequenceId


# ---- daemon to client


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello. `version` is the one both will speak; `lifeline_token` ties the Unix stream to this session."""

    epoch: Epoch
    version: Annotated[int, Integer(1, 2**31 - 1)]
    session_id: Annotated[str, Name(max_bytes=64)]
    model: Annotated[str, Name(max_bytes=256)]
    limits: ServerLimits
    lifeline_token: Annotated[bytes, Binary(LIFELINE_TOKEN_BYTES)] = b""  # empty on tcp
    server: Annotated[str, Name(max_bytes=64, min_bytes=0)] = ""  # the daemon's own version
    capabilities: Capabilities = ()  # those of Hello that the daemon has, too


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued (or attached): one Finished for each of its samples will follow."""

    epoch: Epoch
    request_id: RequestId
    num_samples: Annotated[int, Integer(1, MAX_SAMPLES)] = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one step produced for this client, all its requests together: at most one such message per step."""

    epoch: Epoch
    events: Annotated[tuple[TokenBatch, ...], Many(MAX_EVENTS_PER_MESSAGE)]


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbers that somebody asked for: `count` rows, one after another, of the type that ROW_KINDS says; of each token
    `layers` rows in the kinds of several layers."""

    epoch: Epoch
    request_id: RequestId
    sample: Sample
    kind: Annotated[str, Choice(tuple(ROW_KINDS))]
    index: Index  # of the token that the first row belongs to
    count: Annotated[int, Integer(1, 2**31 - 1)]
    data: Annotated[bytes | tuple[int, int], Blob(MAX_ROWS_BYTES)]
    layers: Annotated[int, Integer(1, MAX_HIDDEN_LAYERS)] = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message about one sample. `text` was held back for a stop string that did not come."""

    epoch: Epoch
    request_id: RequestId
    sample: Sample
    finish_reason: Annotated[str, Choice(FINISH_REASONS)]
    usage: Usage
    text: Annotated[str, Text(65536)] = ""
    error: ErrorInfo | None = None  # exactly when finish_reason is `error`


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person who wonders about a request wants to know; no answer is expected."""

    epoch: Epoch
    request_id: RequestId
    kind: Annotated[str, Choice(NOTICE_KINDS)]
    reason: Annotated[str, Text(1024)] = ""
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    epoch: Epoch
    call_id: CallId
    value: Annotated[Any, Plain()] = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A call, or a request as a whole, is refused: nothing more comes about it. With neither id, what failed was a
    message that could not be read far enough."""

    epoch: Epoch
    code: ErrorCode
    message: ErrorText
    field: FieldName | None = None
    retry_after_ms: RetryAfterMs | None = None
    request_id: RequestId | None = None
    call_id: CallId | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """The session ends; every request of it has had its last message."""

    epoch: Epoch
    reason: Annotated[str, Choice(CLOSING_REASONS)]


ClientMessage = (
    Hello
    | Submit
    | Cancel
    | Credit
    | Attach
    | Goodbye
    | Call
    | OpenSequence
    | AttachSequence
    | Append
    | Generate
    | Fork
    | Truncate
    | Save
    | Restore
    | ReadKV
    | Share
    | CloseSequence
)
DaemonMessage = Welcome | Accepted | Tokens | Rows | Finished | Notice | Reply | Failed | Closing
Message = ClientMessage | DaemonMessage

CLIENT_MESSAGES: dict[str, type[ClientMessage]] = {
    "hello": Hello,
    "submit": Submit,
    "cancel": Cancel,
    "credit": Credit,
    "attach": Attach,
    "goodbye": Goodbye,
    "call": Call,
    "open": OpenSequence,
    "attach_sequence": AttachSequence,
    "append": Append,
    "generate": Generate,
    "fork": Fork,
    "truncate": Truncate,
    "save": Save,
    "restore": Restore,
    "read_kv": ReadKV,
    "share": Share,
    "close": CloseSequence,
}
DAEMON_MESSAGES: dict[str, type[DaemonMessage]] = {
    "welcome": Welcome,
    "accepted": Accepted,
    "tokens": Tokens,
    "rows": Rows,
    "finished": Finished,
    "notice": Notice,
    "reply": Reply,
    "failed": Failed,
    "closing": Closing,
}
