"""kvpoold with a back end for tests, chosen by the first argument; the others are kvpoold's own.

numpy    the slow twin
slow     the same, each step of at least 20 ms, on a thread, as a device would
scripted no arithmetic: the next token is a function of the last one and its position
steady   the same, each step 10 ms, as a device would
stuck    a step never ends
broken   every step fails
paced    the real CPU back end, each step at least 10 ms: the same bits in every batch, and a middle to die in
loading  never gets ready
leaky    numpy, with a pool that forgets to give its first block back
twins    the CUDA back end in float32, NumPy twins in place of its kernels
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvpool.daemon.__main__ import main
from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.settings.config import Config
from kvpool.model.backend import Backend, BackendLimits, Progress
from kvpool.model.batch import StepBatch, StepResult
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel
from kvpool.model.program import Program
from kvpool.model.weights import Checkpoint
from tests.support.numpy_backend import NumpyBackend
from tests.support.scripted_backend import ScriptedBackend

STEP_S = 0.02
PACE_S = 0.01


class SlowBackend(NumpyBackend):
    """Steps take their time, and the loop goes on meanwhile."""

    def launch(self, batch: StepBatch) -> None:
        threading.Thread(target=self._work, args=(batch, time.monotonic() + STEP_S), daemon=True).start()

    def _work(self, batch: StepBatch, until: float) -> None:
        self._result = self._step(batch)
        time.sleep(max(0.0, until - time.monotonic()))
        os.eventfd_write(self._event, 1)


class SteadyBackend(ScriptedBackend):
    """Every step takes the same time, whatever is in it: what varies is the daemon's own."""

    def launch(self, batch: StepBatch) -> None:
        self._batch = batch
        threading.Timer(PACE_S, os.eventfd_write, [self._event, 1]).start()


class StuckBackend(NumpyBackend):
    def launch(self, batch: StepBatch) -> None:
        pass


class BrokenBackend(NumpyBackend):
    def collect(self) -> StepResult:
        super().collect()
        raise RuntimeError("broken for the test")


class LoadingBackend(NumpyBackend):
    def allocate_pool(self, num_blocks: int) -> None:
        logging.getLogger("kvpool").info("loading for ever")
        threading.Event().wait()


class PacedBackend(CpuBackend):
    """Steps begin late."""

    def __init__(self, program: Program, checkpoint: Checkpoint, limits: BackendLimits) -> None:
        super().__init__(program, checkpoint, limits, dtype="float32", threads=1)
        self._waiting = threading.Timer(0.0, lambda: None)

    def launch(self, batch: StepBatch) -> None:
        self._waiting = threading.Timer(PACE_S, super().launch, [batch])
        self._waiting.start()

    def close(self) -> None:
        self._waiting.cancel()
        super().close()


def twins(program: Program, checkpoint: Checkpoint, limits: BackendLimits) -> Backend:
    from kvpool.cuda_kernels.layout import AttentionShape
    from kvpool.model.cuda.backend import CudaBackend
    from tests.support.cuda_card import TwinCard

    config = program.config
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, limits.block_size, "float32")
    return CudaBackend(program, checkpoint, limits, dtype="float32", device=TwinCard(shape, "float32"))


class LeakyBackend(NumpyBackend):
    """Not the back end's fault: the daemon around it loses a block."""

    def allocate_pool(self, num_blocks: int) -> None:
        super().allocate_pool(num_blocks)
        release = BlockPool.release

        def forget(pool: BlockPool, block: int, uid: int) -> None:
            BlockPool.release = release  # type: ignore[method-assign]

        BlockPool.release = forget  # type: ignore[method-assign]


BACKENDS: dict[str, Callable[[Program, Checkpoint, BackendLimits], Backend]] = {
    "numpy": NumpyBackend,
    "slow": SlowBackend,
    "scripted": ScriptedBackend,
    "steady": SteadyBackend,
    "stuck": StuckBackend,
    "broken": BrokenBackend,
    "paced": PacedBackend,
    "loading": LoadingBackend,
    "leaky": LeakyBackend,
    "twins": twins,
}


def make_backend(config: Config, model: LoadedModel, limits: BackendLimits, progress: Progress) -> Backend:
    return BACKENDS[sys.argv[1]](model.program, model.checkpoint, limits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], make_backend=make_backend))
