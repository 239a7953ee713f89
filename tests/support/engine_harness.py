"""A whole engine without sockets: tiny model, NumPy back end, a clock that tests move by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import Finished, Notice, Submit, TokenBatch, pack_token_ids
from kvpool.daemon.engine.engine import Engine
from kvpool.daemon.engine.metrics import Metrics
from kvpool.daemon.engine.prompt_rows import Rows
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.step_runner import StepRunner
from kvpool.daemon.engine.submission import make_request
from kvpool.daemon.engine.text import Text
from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.prefix_cache import PrefixCache
from kvpool.daemon.persistence.journal import Journal
from kvpool.daemon.scheduling.limits import SchedulerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.loading import LoadedModel, load_model
from tests.support.numpy_backend import NumpyBackend
from tests.support.tiny_model import write_tiny_llama

EPOCH = 7
MAX_MODEL_LEN = 256

MakeBackend = Callable[[LoadedModel, BackendLimits], Backend]


@cache
def tiny_model() -> LoadedModel:
    """One tiny Llama for all tests of this process."""
    return load_model(write_tiny_llama(Path(mkdtemp(prefix="kvpool-tiny-"))))


def numpy_backend(model: LoadedModel, limits: BackendLimits) -> Backend:
    return NumpyBackend(model.program, model.checkpoint, limits)


@dataclass
class Answer:
    """Everything that came about one sample."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    finished: Finished | None = None
    notices: list[Notice] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        return self.finished and self.finished.finish_reason


class Harness:
    """Drives an engine turn by turn, and keeps what comes out, checking that every sample ends once."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 128,
        max_model_len: int = MAX_MODEL_LEN,
        host_blocks: int = 0,
        prefix_cache: bool = True,
        make_backend: MakeBackend = numpy_backend,
        journal: Journal | None = None,
        **limits: Any,
    ) -> None:
        model = tiny_model()
        self.now = 100.0
        self.text = Text(
            model.tokenizer,
            model.chat_template,
            vocab_size=model.config.vocab_size,
            max_model_len=max_model_len,
            num_layers=model.config.num_layers,
            hidden_size=model.config.hidden_size,
        )
        self.pool = BlockPool(num_blocks, block_size)
        backend_limits = BackendLimits(block_size, max_num_seqs, max_num_batched_tokens, max_model_len)
        self.backend = make_backend(model, backend_limits)
        self.scheduler = Scheduler(
            self.pool,
            limits=SchedulerLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                **limits,
            ),
            prefix_cache=PrefixCache(self.pool, secret=b"secret") if prefix_cache else None,
            host_blocks=host_blocks,
            works_ahead=self.backend.works_ahead,
        )
        self.backend.allocate_pool(num_blocks)
        if host_blocks:
            self.backend.allocate_host(host_blocks)
        self.metrics = Metrics(self.now)
        runner = StepRunner(self.backend, backend_limits, costs=self.scheduler.costs)
        if host_blocks:
            runner.measure_swap()
        self.engine = Engine(self.scheduler, runner, self.metrics, epoch=EPOCH, journal=journal)
        self.answers: dict[tuple[str, int], Answer] = {}
        self._names = count()

    def submit(
        self, prompt: str | Sequence[int], *, request_id: str = "", uid: int = 1, session: object = None, **options: Any
    ) -> Request:
        """`options` are Submit's fields, and SamplingParams' (greedy and 8 tokens unless given)."""
        fields = {name: options.pop(name) for name in list(options) if name in Submit.__dataclass_fields__}
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | options))
        message = Submit(
            request_id or f"r{next(self._names)}",
            prompt=prompt if isinstance(prompt, str) else pack_token_ids(prompt),
            params=params.to_wire(),
            **fields,
        )
        request = make_request(message, self.text, uid, self.now)
        request.session = session
        self.engine.submit(request)
        return request

    def turn(self) -> None:
        """One turn, the device's step awaited."""
        self.engine.turn(self.now, step_done=self.engine.in_flight)
        for request, message in self.engine.take_outputs():
            index = message.sample or 0
            answer = self.answers.setdefault((request.request_id, index), Answer())
            assert answer.finished is None, f"{request.request_id} goes on after its end: {message}"
            if isinstance(message, TokenBatch):
                assert message.index == len(answer.token_ids)
                answer.token_ids += message.token_ids
                answer.text += "".join(message.texts)
                answer.logprobs += message.logprobs
                answer.top_logprobs += message.top_logprobs
            elif isinstance(message, Rows):
                answer.rows.append(message)
            elif isinstance(message, Finished):
                answer.finished = message
                answer.text += message.text
                assert message.usage.completion_tokens == len(answer.token_ids)
            else:
                answer.notices.append(message)

    def run(self, max_turns: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(max_turns):
            self.turn()
            if not self.engine.in_flight and not self.scheduler.has_work:
                return
        raise AssertionError("the engine does not come to an end")

    def answer(self, request: Request, index: int = 0) -> Answer:
        return self.answers[(request.request_id, index)]

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Answer:
        """Submit one request and run it to its end."""
        request = self.submit(prompt, **options)
        self.run()
        return self.answer(request)

    def assert_clean(self) -> None:
        """No sequence, no block and no row of a table is left, and the books agree."""
        self.scheduler.check_invariants()
        assert not self.scheduler.roster.sequences
        assert self.pool.num_free == self.pool.num_blocks
        assert self.engine.idle
        assert all(answer.finished is not None for answer in self.answers.values())

    def close(self) -> None:
        self.backend.close()
        self.text.close()


def prompts(number: int, length: int, seed: int = 0) -> list[list[int]]:
    """Different token ids, none of them special."""
    import random

    source = random.Random(seed)
    return [[source.randrange(3, 384) for _ in range(length)] for _ in range(number)]


def reasons(answers: Iterable[Answer]) -> list[str | None]:
    return [answer.reason for answer in answers]
