"""An engine that has no server of its own, driven by bench/peers.py over pipes. Runs under the engine's own Python.

    PYTHON peer_child.py openvino MODEL_DIR | transformers MODEL_DIR

Writes a line `{"ready": version}`; then for each line of work `{"prompts": [[token, ...], ...], "arrivals": [seconds,
...], "output_tokens": [n, ...]}` one line with a list of `[first_s, last_s, tokens]`, counted from the line's arrival.
Needs nothing of kvpool. Flags are the best known ones; where they can be chosen, by KEY=VALUE behind MODEL_DIR.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class OpenVino:
    """OpenVINO GenAI's continuous batching with its prefix cache, stepped by hand."""

    def __init__(
        self, model: str, max_num_batched_tokens: str = "512", cache_gb: str = "2", threads: str = "2"
    ) -> None:
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = int(cache_gb)
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = int(max_num_batched_tokens)
        scheduler.max_num_seqs = 256
        properties = {"INFERENCE_NUM_THREADS": int(threads), "PERFORMANCE_HINT": "LATENCY"}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tensor, self._config = openvino.Tensor, openvino_genai.GenerationConfig
        self._next_id = 0
        self.version = f"OpenVINO {openvino.__version__}"

    def run(self, prompts: list[list[int]], arrivals: list[float], output_tokens: list[int]) -> list[list[float]]:
        import numpy as np

        start, handles = time.perf_counter(), []
        served = [[0.0, 0.0, 0] for _ in prompts]
        while len(handles) < len(prompts) or self._pipe.has_non_finished_requests():
            now = time.perf_counter() - start
            while len(handles) < len(prompts) and arrivals[len(handles)] <= now:
                number = len(handles)
                config = self._config()
                config.max_new_tokens = config.min_new_tokens = output_tokens[number]
                config.ignore_eos, config.do_sample = True, False
                prompt = self._tensor(np.array([prompts[number]], dtype=np.int64))
                handles.append(self._pipe.add_request(self._next_id, prompt, config))
                self._next_id += 1
            if not self._pipe.has_non_finished_requests():
                time.sleep(0.001)
                continue
            self._pipe.step()
            now = time.perf_counter() - start
            for handle, entry in zip(handles, served, strict=False):
                if handle.can_read():
                    tokens = sum(len(output.generated_ids) for output in handle.read().values())
                    if tokens:
                        entry[0] = entry[0] or now
                        entry[1], entry[2] = now, entry[2] + tokens
        return served


class Transformers:
    """`generate` of a whole batch; all prompts have one length, and all arrive at once. In bfloat16 where the processor
    has instructions for it; where it has not, float32 reads prompts four times as fast."""

    def __init__(self, model: str, dtype: str = "", threads: str = "2") -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import transformers

        dtype = dtype or ("bfloat16" if "_bf16" in Path("/proc/cpuinfo").read_text() else "float32")
        torch.set_num_threads(int(threads))
        self._torch, self._library = torch, transformers
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}"

    def run(self, prompts: list[list[int]], arrivals: list[float], output_tokens: list[int]) -> list[list[float]]:
        times: list[float] = []
        start, count = time.perf_counter(), output_tokens[0]

        def clock(ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter() - start)
            return scores

        config = self._library.GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            mask = self._torch.ones_like(ids)
            out = self._model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])
        end = time.perf_counter() - start
        return [[times[0], end, out.shape[1] - ids.shape[1]] for _ in prompts]


KINDS = {"openvino": OpenVino, "transformers": Transformers}


def main() -> None:
    kind, model, *flags = sys.argv[1:]
    del sys.path[0]  # this folder: a library that looks for its own `kernels` must not find ours
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    engine = KINDS[kind](model, **dict(flag.split("=", 1) for flag in flags))
    print(json.dumps({"ready": engine.version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
