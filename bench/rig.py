"""A real model on this machine's CPU behind the daemon's own scheduler, pool and engine, without sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvpool.client.sampling_params import SamplingParams
from kvpool.daemon.engine.engine import Engine
from kvpool.daemon.engine.metrics import Metrics
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.step_runner import StepRunner
from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.scheduling.limits import SchedulerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel

UID = 1000


@contextmanager
def cpu_backend(model: LoadedModel, limits: BackendLimits, num_blocks: int, threads: int = 0) -> Iterator[CpuBackend]:
    """The back end as the daemon would choose it (0 threads: all cores), its kernels compiled, its pool allocated."""
    backend = CpuBackend(model.program, model.checkpoint, limits, threads=threads)
    try:
        backend.allocate_pool(num_blocks)
        yield backend
    finally:
        backend.close()


def make_request(name: str, prompt_ids: list[int], params: SamplingParams, arrival: float = 0.0) -> Request:
    """A request of nobody in particular, for token ids."""
    return Request(
        name, UID, prompt_ids, params, seed=0, stop_token_ids=frozenset(), text=None, arrival=arrival, want_text=False
    )


@dataclass
class Rig:
    """An engine that is turned by hand."""

    scheduler: Scheduler
    engine: Engine

    @classmethod
    def of(cls, backend: CpuBackend, limits: BackendLimits, num_blocks: int) -> Rig:
        """Over a pool of its own, with an empty memory and no prefix cache."""
        of_scheduler = SchedulerLimits(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len)
        scheduler = Scheduler(BlockPool(num_blocks, limits.block_size), limits=of_scheduler)
        runner = StepRunner(backend, limits, costs=scheduler.costs)
        return cls(scheduler, Engine(scheduler, runner, Metrics(time.monotonic()), epoch=1))

    def turns(self) -> Iterator[None]:
        """Turn until nothing is left to do; between the turns, whoever iterates may look."""
        while not self.engine.idle:
            self.engine.turn(time.monotonic(), step_done=self.engine.in_flight)
            self.engine.take_outputs()
            yield
