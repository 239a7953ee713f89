"""A client process of another user that submits many requests at once and reads them to their ends.

`with Flood(address, uid, requests=60, max_tokens=40):` goes on when all are accepted; leaving it kills the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 10


class Flood:
    def __init__(self, address: str, uid: int, *, requests: int, max_tokens: int) -> None:
        command = [sys.executable, __file__, address, str(uid), str(requests), str(max_tokens)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __enter__(self) -> Flood:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "accepted\n"
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from kvpool.client import Client
    from tests.support.other_user import become

    address, uid, requests, max_tokens = sys.argv[1], *map(int, sys.argv[2:])
    become(uid, uid)
    with Client(address, stream_timeout_s=600.0) as pool:
        streams = [
            pool.submit([uid % 300 + 3, number + 3] * (PROMPT_TOKENS // 2), max_tokens=max_tokens, ignore_eos=True)
            for number in range(requests)
        ]
        while len(pool.ps()) < requests:  # what was submitted before this question was taken before it
            pass
        print("accepted", flush=True)
        for stream in streams:
            stream.result()


if __name__ == "__main__":
    main()
