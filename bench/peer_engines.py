"""The engines that bench/peers.py compares, behind one face: start, run a workload, how much memory, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvpool.client import AsyncClient, Client, KVPoolError

READY_LIMIT_S = 600.0  # vLLM compiles for minutes
ANSWER_LIMIT_S = 1800.0  # of a library, for one work
GREEDY = {"temperature": 0.0, "ignore_eos": True}
CHILD = Path(__file__).with_name("peer_child.py")


@dataclass(frozen=True)
class Work:
    """Requests of one workload. `prompts` are token ids; arrivals are seconds from the start."""

    name: str
    prompts: list[list[int]]
    arrivals: list[float]
    output_tokens: list[int]

    @property
    def at_once(self) -> bool:
        return not any(self.arrivals)


@dataclass
class Served:
    """One request: seconds from the start of the workload, and tokens that came."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


class Engine(Protocol):
    """A peer. `start` returns when it is ready to serve; what it cannot run raises NotImplementedError."""

    name: str

    def start(self) -> None: ...
    def run(self, work: Work) -> list[Served]: ...
    def pid(self) -> int: ...
    def stop(self) -> None: ...


def peak_rss_mib(pid: int) -> float:
    """Peak resident size of a process and all its descendants, as the kernel counts it."""
    total = 0.0
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        total += next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(peak_rss_mib(int(child)) for child in (task / "children").read_text().split())
    return total


class Process:
    """A server in a process group of its own, its output in a file that is shown when it fails."""

    def __init__(self, command: list[str], environ: dict[str, str] | None = None) -> None:
        self.log = tempfile.NamedTemporaryFile(prefix="peer-", suffix=".log")  # noqa: SIM115 - closed by stop
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if environ is None else self.log,
            stderr=self.log,
            env=os.environ | (environ or {}),
            start_new_session=True,
        )

    def failed(self, why: str) -> RuntimeError:
        return RuntimeError(f"{why}:\n{Path(self.log.name).read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()


# -- kvpool -----------------------------------------------------------------------------------------------------------


class KVPool:
    """The daemon, and a client of it in this process."""

    def __init__(self, model: str, flags: list[str]) -> None:
        self.name = " ".join(["kvpool", *flags])
        self._flags = ["--model", model, *flags]

    def start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvb")
        self._address = str(Path(self._directory.name) / "kvpool.sock")
        command = [sys.executable, "-m", "kvpool.daemon", "--address", self._address, *self._flags]
        self._process = Process(command, environ={})
        give_up = time.monotonic() + READY_LIMIT_S
        while True:
            with contextlib.suppress(KVPoolError), Client(self._address, timeout_s=READY_LIMIT_S):
                return
            if self._process.process.poll() is not None or time.monotonic() > give_up:
                raise self._process.failed("kvpool did not start")
            time.sleep(0.02)

    def run(self, work: Work) -> list[Served]:
        return asyncio.run(self._run(work))

    async def _run(self, work: Work) -> list[Served]:
        async with AsyncClient(self._address, client_name="peers") as pool:
            start = time.perf_counter()

            async def one(prompt: list[int], at_s: float, count: int) -> Served:
                served = Served()
                await asyncio.sleep(at_s - (time.perf_counter() - start))
                stream = await pool.submit(prompt, max_tokens=count, want_text=False, **GREEDY)
                async with stream:
                    async for _ in stream:
                        served.last_s = time.perf_counter() - start
                        served.first_s = served.first_s or served.last_s
                        served.tokens += 1
                return served

            parts = zip(work.prompts, work.arrivals, work.output_tokens, strict=True)
            return list(await asyncio.gather(*(one(*part) for part in parts)))

    def pid(self) -> int:
        return self._process.process.pid

    def stop(self) -> None:
        self._process.stop()
        self._directory.cleanup()


# -- servers that speak HTTP ------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class HttpServer:
    """A server that streams server-sent events; subclasses say how it starts, is asked, and counts tokens."""

    path = ""
    health = "/health"

    def __init__(self, executable: str, model: str, flags: list[str]) -> None:
        self.executable, self.model, self.flags = executable, model, flags
        self.name = " ".join([type(self).__name__, Path(model).name, *flags])

    def command(self, port: int) -> list[str]:
        raise NotImplementedError

    def body(self, prompt: list[int], count: int) -> dict[str, Any]:
        raise NotImplementedError

    def tokens_of(self, event: dict[str, Any]) -> int | None:
        """The number of tokens generated, where an event says it."""
        raise NotImplementedError

    def environ(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        self._port = free_port()
        self._process = Process(self.command(self._port), self.environ())
        give_up = time.monotonic() + READY_LIMIT_S
        while not asyncio.run(self._is_ready()):
            if self._process.process.poll() is not None or time.monotonic() > give_up:
                raise self._process.failed(f"{self.name} did not start")
            time.sleep(0.2)

    async def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(f"GET {self.health} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return b" 200 " in answer.split(b"\r\n", 1)[0]
        return False

    def run(self, work: Work) -> list[Served]:
        return asyncio.run(self._run(work))

    async def _run(self, work: Work) -> list[Served]:
        start = time.perf_counter()
        parts = zip(work.prompts, work.arrivals, work.output_tokens, strict=True)
        return list(await asyncio.gather(*(self._one(start, *part) for part in parts)))

    async def _one(self, start: float, prompt: list[int], at_s: float, count: int) -> Served:
        await asyncio.sleep(at_s - (time.perf_counter() - start))
        body = json.dumps(self.body(prompt, count)).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        served = Served()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter() - start
                served.first_s, served.last_s = served.first_s or now, now
                served.tokens = self.tokens_of(json.loads(line[6:])) or served.tokens
        writer.close()
        return served

    def pid(self) -> int:
        return self._process.process.pid

    def stop(self) -> None:
        self._process.stop()


class LlamaServer(HttpServer):
    """llama.cpp's server: flash attention, slots of their own, its prompt cache on."""

    path = "/completion"

    def command(self, port: int) -> list[str]:
        threads = str(os.cpu_count())
        fixed = ["-t", threads, "-tb", threads, "-np", "32", "-c", "32768", "-b", "2048", "-ub", "512", "-fa", "on"]
        place = ["--host", "127.0.0.1", "--port", str(port)]
        return [self.executable, "-m", self.model, *place, *fixed, "--no-webui", *self.flags]

    def environ(self) -> dict[str, str]:
        folder = str(Path(shutil.which(self.executable) or self.executable).resolve().parent)
        return {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}

    def body(self, prompt: list[int], count: int) -> dict[str, Any]:
        wish = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "stream": True, "cache_prompt": True}
        return wish | {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}

    def tokens_of(self, event: dict[str, Any]) -> int | None:
        return event["tokens_predicted"] if event.get("stop") else None


class Vllm(HttpServer):
    """vLLM's CPU build through its OpenAI server; `executable` is the Python that has it."""

    path = "/v1/completions"

    def command(self, port: int) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--no-enable-log-requests"]
        fixed = ["--dtype", "bfloat16", "--enable-prefix-caching", "--max-model-len", "2048", "--max-num-seqs", "64"]
        server = "vllm.entrypoints.openai.api_server"
        return [self.executable, "-m", server, "--model", self.model, *place, *fixed, *self.flags]

    def environ(self) -> dict[str, str]:
        cores = f"0-{(os.cpu_count() or 1) - 1}"
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        preload = {"LD_PRELOAD": ":".join(self._faster_libraries())}
        return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores} | quiet | preload

    def _faster_libraries(self) -> list[str]:
        """Those that vLLM's documents advise to preload, as far as they are installed."""
        openmp = Path(self.executable).absolute().parent.parent / "lib" / "libiomp5.so"
        return [str(path) for path in [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), openmp] if path.exists()]

    def body(self, prompt: list[int], count: int) -> dict[str, Any]:
        wish = {"model": "m", "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
        return wish | {"stream": True, "stream_options": {"include_usage": True}}

    def tokens_of(self, event: dict[str, Any]) -> int | None:
        usage = event.get("usage")
        return usage["completion_tokens"] if usage else None


# -- libraries --------------------------------------------------------------------------------------------------------


class Library:
    """An engine without a server, in a process under its own Python: see bench/peer_child.py."""

    kind = ""

    def __init__(self, executable: str, model: str, flags: list[str]) -> None:
        self._command = [executable, str(CHILD), self.kind, model, *flags]
        self.name = " ".join([self.kind, Path(model).name, *flags])

    def start(self) -> None:
        self._process = Process(self._command)
        self._answer()

    def _answer(self) -> Any:
        assert self._process.process.stdout is not None
        if not select.select([self._process.process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            raise self._process.failed(f"{self.name} did not answer within {ANSWER_LIMIT_S:.0f} s")
        line = self._process.process.stdout.readline()
        if not line:
            raise self._process.failed(f"{self.name} ended")
        return json.loads(line)

    def run(self, work: Work) -> list[Served]:
        wish = {"prompts": work.prompts, "arrivals": work.arrivals, "output_tokens": work.output_tokens}
        assert self._process.process.stdin is not None
        self._process.process.stdin.write(json.dumps(wish).encode() + b"\n")
        self._process.process.stdin.flush()
        return [Served(first, last, int(tokens)) for first, last, tokens in self._answer()]

    def pid(self) -> int:
        return self._process.process.pid

    def stop(self) -> None:
        self._process.stop()


class OpenVino(Library):
    """OpenVINO GenAI, without HTTP."""

    kind = "openvino"


class Transformers(Library):
    """Hugging Face's `generate` on a static batch: nothing arrives later."""

    kind = "transformers"

    def run(self, work: Work) -> list[Served]:
        if not work.at_once:
            raise NotImplementedError("a static batch")
        return super().run(work)


KINDS = {"llama": LlamaServer, "vllm": Vllm, "openvino": OpenVino, "transformers": Transformers}
MODULES = {"vllm": "vllm", "openvino": "openvino_genai", "transformers": "transformers"}


def find(kind: str, executable: str, model: str, flags: list[str]) -> Engine | str:
    """The peer, or why it is skipped."""
    if shutil.which(executable) is None:
        return f"{executable} is not there"
    if not Path(model).exists():
        return f"{model} is not there"
    module = MODULES.get(kind)
    if module and subprocess.run([executable, "-c", f"import {module}"], capture_output=True).returncode:
        return f"{executable} cannot import {module}"
    return KINDS[kind](executable, model, flags)
