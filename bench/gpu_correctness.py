"""The sections of `bench/gpu_check.py` that ask whether the card is right: the kernel tests on it, and a daemon."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.gpu_sections import Ask, Row
from kvpool.client import Client, SamplingParams
from kvpool.client.wire.errors import KVPoolError

ROOT = Path(__file__).resolve().parents[1]
KERNEL_TESTS = ("rows", "kv_write", "matmul", "quantised", "decode", "prefill", "sampling", "backend")
START_S = 60.0
DRY_START_S = 300.0  # on a machine with other work
PROMPTS = (
    "The sea is",
    "Once upon a time there was a harbour master who",
    "A list of numbers: 1, 2, 3, 5, 8,",
    "What is the capital of France?",
)


def compile_kernel(name: str) -> float:
    """Compile one kernel of the machine-code test into the cache that the tests use; seconds."""
    from tests.test_cuda_machine_code import KERNELS

    begin = time.perf_counter()
    KERNELS[name]()
    return time.perf_counter() - begin


def compile_all(ask: Ask) -> Iterator[Row]:
    """Every kernel once, on all processors, so that no later section waits for the compiler."""
    from tests.test_cuda_machine_code import KERNELS

    names = ["copy_blocks", "rms_norm float32 accumulate"] if ask.dry else list(KERNELS)
    begin = time.perf_counter()
    workers = min(len(names), len(os.sched_getaffinity(0)), 16)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        longest = max(pool.map(compile_kernel, names))
    yield Row("compile", f"{len(names)} kernels", time.perf_counter() - begin, "s", note=f"the longest {longest:.1f} s")


class Reports:
    """A pytest plugin that remembers how tests ended."""

    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            self.failures.append((report.nodeid, next((x for x in lines if x.startswith("E ")), lines[-1])))
        elif report.when == "call" and report.passed:
            self.passed += 1


def kernels(ask: Ask) -> Iterator[Row]:
    """The kernel and back-end tests, the slow ones too, with kernels on the card and inputs that nobody has seen."""
    import pytest

    seed = secrets.randbelow(1 << 30)
    os.environ["KVPOOL_TEST_CARD"] = "interpreter" if ask.dry else "cuda"
    os.environ["KVPOOL_TEST_SEED"] = str(seed)
    failed = 0
    for name in KERNEL_TESTS[:1] if ask.dry else KERNEL_TESTS:
        reports = Reports()
        chosen = ["-k", "copy_blocks or accumulates"] if ask.dry else ["-m", ""]
        path = str(ROOT / "tests" / f"test_cuda_{name}.py")
        pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *chosen, path], plugins=[reports])
        note = f"KVPOOL_TEST_SEED={seed}"
        yield Row("kernels", f"test_cuda_{name}", float(reports.passed), "passed", note=note)
        for test, why in reports.failures:
            yield Row("kernels", test.split("::")[-1], note=f"FAILED {why}")
        failed += len(reports.failures) or int(reports.passed == 0)
    if failed:
        raise RuntimeError(f"{failed} tests failed")


@contextmanager
def served(ask: Ask, device: str, dtype: str) -> Iterator[Path]:
    """A daemon of its own, from the moment it is started: the path of its socket, its log is beside it.

    Dry: the tiny model, and the CUDA back end with NumPy twins for kernels.
    """
    with tempfile.TemporaryDirectory(prefix="kvpg") as folder:
        address = Path(folder, "s")
        flags: dict[str, Any] = {"address": address, "device": device, "dtype": dtype, "max-model-len": 256}
        flags |= {"model": ask.model, "pool-bytes": "1GiB"}
        command = [sys.executable, "-m", "kvpool.daemon"]
        if ask.dry:
            from tests.support.tiny_model import write_tiny_llama

            flags |= {"model": write_tiny_llama(Path(folder, "model")), "pool-bytes": "2MiB", "device": "cpu"}
            if device == "cuda":
                command = [sys.executable, str(ROOT / "tests" / "support" / "daemon_main.py"), "twins"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        with open(address.with_name("log"), "wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stderr=file, stdout=file)
            try:
                yield address
            finally:
                process.terminate()
                process.wait(30)


def connected(address: Path, start_s: float) -> Client:
    """A client, once the daemon answers; RuntimeError with the end of its log if it does not."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if address.exists():
            client = Client(str(address), timeout_s=start_s)
            with suppress(KVPoolError):
                client.connect()
                return client
            client.close()
        time.sleep(0.1)
    raise RuntimeError(f"the daemon does not answer: {address.with_name('log').read_text(errors='replace')[-500:]}")


def generated(client: Client, prompts: Sequence[str], tokens: int) -> list[Any]:
    """Results of greedy requests that run together."""
    params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
    streams = [client.submit(prompt, params) for prompt in prompts]
    return [stream.result() for stream in streams]


def daemon(ask: Ask) -> Iterator[Row]:
    """The model through the daemon: the CPU's tokens in float32, and the same bits alone and in company."""
    tokens = 6 if ask.dry else 32
    with ExitStack() as stack:
        kinds = [("cpu", "float32"), ("cuda", "float32"), ("cuda", "float32" if ask.dry else "bfloat16")]
        addresses = [stack.enter_context(served(ask, *kind)) for kind in kinds]  # they start side by side
        start_s = DRY_START_S if ask.dry else START_S
        cpu, exact, fast = (stack.enter_context(connected(address, start_s)) for address in addresses)
        expected, got = ([each.token_ids for each in generated(client, PROMPTS, tokens)] for client in (cpu, exact))
        same = sum(a == b for a, b in zip(got, expected, strict=True))
        yield Row("daemon", "float32: the CPU's tokens", float(same), f"of {len(PROMPTS)} alike")
        alone = [generated(fast, [prompt], tokens)[0] for prompt in PROMPTS]
        together = generated(fast, PROMPTS * (1 if ask.dry else 12), tokens)
    alike = 0
    for i, result in enumerate(together):
        own = alone[i % len(PROMPTS)]
        # The twins of a dry run multiply by NumPy, whose sums depend on the batch: their tokens agree, not their bits.
        alike += result.token_ids == own.token_ids and (ask.dry or result.logprobs == own.logprobs)
    yield Row("daemon", "the same bits alone and together", float(alike), f"of {len(together)} alike")
    if same < len(PROMPTS) or alike < len(together):
        raise RuntimeError("tokens or logprobs differ")


CHECKED: dict[str, Callable[[Ask], Iterator[Row]]] = {"compile": compile_all, "kernels": kernels, "daemon": daemon}
