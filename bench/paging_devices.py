"""What carries out the steps of bench.paging: a cost model of a large GPU, or a real model on this machine's CPU."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Protocol

from kvpool.client.sampling_params import SamplingParams
from kvpool.daemon.engine.request import Sample
from kvpool.daemon.engine.step_runner import StepRunner
from kvpool.daemon.memory.host_pool import PreemptionCosts
from kvpool.daemon.memory.sequence import Sequence
from kvpool.daemon.scheduling.step_plan import StepPlan
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend

from .rig import make_request

Tokens = dict[int, int | None]
"""The sampled token by sequence id, as Scheduler.update takes it."""


class Device(Protocol):
    """Makes sequences that it can run, and runs steps."""

    def sequence(self, prompt: int, output: int, arrival: float) -> Sequence:
        """A sequence of `prompt` tokens that will produce `output` more."""

    def step(self, plan: StepPlan) -> tuple[float, Tokens]:
        """Carry out a plan: the seconds it took, and its tokens."""

    def over(self, sequence: Sequence) -> None:
        """The sequence has ended."""


@dataclass(frozen=True)
class LargeGpu:
    """A large GPU and an 8B transformer with grouped queries (32 layers, 8 KV heads of 128, bfloat16), as far as a
    step's time depends on them: the longer of reading its bytes (weights, and the context of every sequence in it) and
    doing its arithmetic, plus a constant."""

    weight_bytes: float = 16.1e9
    kv_bytes_per_token: float = 2 * 32 * 8 * 128 * 2
    flop_per_token: float = 16.1e9
    bytes_per_s: float = 4.8e12 * 0.85
    flop_per_s: float = 990e12 * 0.6
    fixed_s: float = 1e-3

    def sequence(self, prompt: int, output: int, arrival: float) -> Sequence:
        return Sequence(uid=0, token_ids=[0] * prompt, max_tokens=output, arrival=arrival)

    def step(self, plan: StepPlan) -> tuple[float, Tokens]:
        context = sum(chunk.start + chunk.num_tokens for chunk in plan.chunks)
        read_s = (self.weight_bytes + context * self.kv_bytes_per_token) / self.bytes_per_s
        seconds = self.fixed_s + max(read_s, plan.num_tokens * self.flop_per_token / self.flop_per_s)
        return seconds, {chunk.sequence.sequence_id: 0 for chunk in plan.sampling_chunks}

    def over(self, sequence: Sequence) -> None:
        pass


class RealCpu:
    """A real model behind the daemon's own StepRunner; prompts are random tokens, answers as long as they are asked to
    be. A step's time is the CPU time of this process since the step before, so what the scheduler takes counts too, and
    what others do on the machine does not: the back end has one thread, which nobody waits for but this one."""

    def __init__(self, backend: CpuBackend, limits: BackendLimits, vocab_size: int) -> None:
        self._runner = StepRunner(backend, limits, costs=PreemptionCosts())
        self._dice = random.Random(1)
        self._vocab_size = vocab_size
        self._last_end = time.process_time()

    def sequence(self, prompt: int, output: int, arrival: float) -> Sequence:
        tokens = [self._dice.randrange(100, self._vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        return Sample.of(make_request("r", tokens, params, arrival), 0).sequence

    def step(self, plan: StepPlan) -> tuple[float, Tokens]:
        for sequence in plan.preempted:
            self.over(sequence)
        self._runner.start(plan)
        result, _ = self._runner.collect()
        began, self._last_end = self._last_end, time.process_time()
        ids = (chunk.sequence.sequence_id for chunk in plan.sampling_chunks)
        return self._last_end - began, dict(zip(ids, result.tokens.tolist(), strict=True))

    def over(self, sequence: Sequence) -> None:
        if isinstance(sequence.client_data, Sample):
            self._runner.release(sequence.client_data)
