"""A client process that makes one request after another while its daemon is killed again and again.

    chaos_client.py ADDRESS CATALOGUE SEED

CATALOGUE is a JSON file of submit's arguments. After each request a line of JSON says which one it was and all that
came of it. It begins no more when its standard input is closed.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PATIENCE_S = 60.0


def ask(pool: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Stream one request and put down everything that can be compared."""
    events: list[tuple[int, int]] = []
    epochs = {pool.connect().epoch}
    with pool.submit(**arguments) as stream:
        texts = [""] * arguments.get("n", 1)
        for event in stream:
            texts[event.sample] += event.text
            if event.token_id >= 0:
                events.append((event.sample, event.index))
        result = stream.result()
    epochs.add(pool.connect().epoch)
    return {
        "outputs": [
            [o.token_ids, o.text, o.logprobs, _pairs(o.top_logprobs), o.finish_reason, o.usage.completion_tokens]
            for o in result.outputs
        ],
        "texts": texts,
        "in_order": all(
            [index for sample, index in events if sample == number] == list(range(len(output.token_ids)))
            for number, output in enumerate(result.outputs)
        ),
        "daemons": len(epochs),
    }


def _pairs(top_logprobs: list[dict[int, float]] | None) -> list[list[tuple[int, float]]]:
    return [sorted(top.items()) for top in top_logprobs or ()]


def main(address: str, catalogue_path: str, seed: int) -> None:
    from kvpool.client import Client, ConnectionLost, KVPoolError, ShuttingDown

    catalogue = json.loads(Path(catalogue_path).read_text())
    choose = random.Random(seed)
    with_stdin_open = select.poll()
    with_stdin_open.register(sys.stdin, select.POLLIN | select.POLLHUP)
    pool = Client(address, reconnect_s=PATIENCE_S, timeout_s=PATIENCE_S, stream_timeout_s=PATIENCE_S)
    while not with_stdin_open.poll(0):
        number = choose.randrange(len(catalogue))
        while True:  # nobody listens at the moment: nothing was asked yet
            try:
                pool.connect()
                break
            except (ConnectionLost, ShuttingDown):
                time.sleep(0.02)
        try:
            answer = ask(pool, catalogue[number])
        except KVPoolError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"number": number} | answer), flush=True)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
