"""Between people's text and the model's token ids: prompts, chat messages, and text that appears token by token."""

from __future__ import annotations

from collections.abc import Sequence

from ...client.wire.errors import InvalidArgument, TooLong, Unsupported
from ...client.wire.protocol import ChatMessage, unpack_token_ids
from ...model.text.chat_template import ChatTemplate, TemplateError
from ...model.text.detokenizer import StreamDetokenizer
from ...model.text.tokenizer import Tokenizer

MAX_BYTES_PER_TOKEN = 256
"""Longer than the tokens of real vocabularies. Text of more than max_model_len times this cannot fit, and is refused
before it is tokenised: tokenising megabytes would keep everybody waiting."""

ANSWER = "kvpool-answer"
"""Stands for an assistant's turn in a rendering that shows what a template writes after one."""


class Text:
    """A model's tokenizer and chat template, with the numbers that requests are checked against."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        vocab_size: int,
        max_model_len: int,
        num_layers: int,
        hidden_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.vocab_size = vocab_size
        self.num_layers, self.hidden_size = num_layers, hidden_size
        self._max_model_len = max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._tokenizer.eos_token_ids

    def prompt_ids(self, prompt: str | bytes | None, messages: Sequence[ChatMessage] | None) -> list[int]:
        """Token ids of exactly one of the two: text or packed ids, or chat messages. Raises KVPoolError."""
        if (prompt is None) == (messages is None):
            raise InvalidArgument("give exactly one of prompt and messages", field="prompt")
        if isinstance(prompt, bytes):
            token_ids = self._checked(prompt)
        elif prompt is not None:
            token_ids = self.tokenize(prompt)
        else:
            token_ids = self._tokenizer.encode(self._render(messages or ()), special=True)
        if not token_ids:
            raise InvalidArgument("is empty; a sequence needs at least one token", field="prompt")
        return token_ids

    def continuation_ids(
        self, prompt: str | bytes | None, messages: Sequence[ChatMessage] | None, before: Sequence[int]
    ) -> list[int]:
        """Token ids to follow the tokens `before`: text as it stands, packed ids, or the next turns of a conversation.

        Turns end the assistant's turn first, unless its end was generated already. Raises KVPoolError.
        """
        if (prompt is None) == (messages is None):
            raise InvalidArgument("give exactly one of prompt and messages", field="prompt")
        if isinstance(prompt, bytes):
            return self._checked(prompt)
        if prompt is not None:
            self._check_length(prompt, "prompt")
            return self._tokenizer.encode(prompt, special=False, add_bos=False, continuing=True)
        token_ids = self._tokenizer.encode(
            self._render_next(messages or ()), special=True, add_bos=False, continuing=True
        )
        ended = before[-1:] == token_ids[:1] and before[-1] in self.eos_token_ids
        return token_ids[1:] if ended else token_ids

    def _render_next(self, messages: Sequence[ChatMessage]) -> str:
        """What the chat template writes after an assistant's words when these turns follow."""
        turns = (ChatMessage("user", "?"), ChatMessage("assistant", ANSWER), *messages)
        _, found, rest = self._render(turns).partition(ANSWER)
        if not found or ANSWER in rest:
            raise Unsupported("this model's chat template cannot go on with a conversation", field="messages")
        return rest

    def _checked(self, packed: bytes) -> list[int]:
        token_ids = unpack_token_ids(packed)
        outside = token_ids >= self.vocab_size
        if outside.any():
            raise InvalidArgument(
                f"must be below the model's vocab_size {self.vocab_size}", field=f"prompt[{int(outside.argmax())}]"
            )
        ids: list[int] = token_ids.tolist()
        return ids

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a person's text; the texts of special tokens are ordinary characters in it."""
        self._check_length(text, "prompt")
        return self._tokenizer.encode(text, special=False)

    def detokenize(self, packed: bytes) -> str:
        return self._tokenizer.decode(self._checked(packed))

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if self._chat_template is None:
            raise Unsupported("this model has no chat template; send a prompt instead", field="messages")
        try:
            text = self._chat_template.render([{"role": m.role, "content": m.content} for m in messages])
        except TemplateError as error:
            raise InvalidArgument(str(error), field="messages") from None
        self._check_length(text, "messages")
        return text

    def _check_length(self, text: str, field: str) -> None:
        most = self._max_model_len * MAX_BYTES_PER_TOKEN
        if len(text) > most:
            raise TooLong(
                f"has {len(text)} characters, far more than max_model_len {self._max_model_len} takes", field=field
            )

    def detokenizer(self, *, show_special: bool = False) -> StreamDetokenizer:
        """For text that follows a prompt."""
        return StreamDetokenizer(self._tokenizer, continuing=True, show_special=show_special)

    def close(self) -> None:
        """End the chat template's helper process."""
        if self._chat_template is not None:
            self._chat_template.close()
