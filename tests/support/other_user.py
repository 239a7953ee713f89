"""A client process of another user: one session that does what a list says, and prints what came of it.

Only root can become somebody else. `operations` are lists: a method, the name of the sequence it is about, and the
method's arguments by name. What came of each is its value (the sequence's `num_tokens`, or generated token ids), or the
code of the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def as_user(address: str, uid: int, gid: int, operations: list[list[Any]]) -> list[Any]:
    """Run the operations as `uid` with the group `gid` and no other."""
    command = [sys.executable, __file__, address, str(uid), str(gid), json.dumps(operations)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def become(uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from kvpool.client import Client, KVPoolError
    from kvpool.client.client import Sequence

    address, uid, gid, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    become(uid, gid)
    results: list[Any] = []
    with Client(address, timeout_s=20.0) as pool:

        def perform(method: str, name: str, arguments: dict[str, Any]) -> Any:
            if method in ("open", "restore"):
                return getattr(pool, method)(**arguments, sequence_id=name).num_tokens
            if method == "attach":
                return pool.attach(name).num_tokens
            if method in ("ps", "stats", "fsck", "drain", "reload", "pins"):
                return getattr(pool, method)()
            if method == "map":
                found = pool.pool_map()
                return {"owners": sorted({*found.owners.tolist()}), "sequences": found.sequences}
            if method == "resize":
                return pool.resize(**arguments)
            if method == "unpin":
                return pool.unpin(**arguments)
            if method == "cancel":
                return pool.cancel(name)
            if method == "follow":
                return pool.follow(name).result().token_ids
            if method == "submit":
                result = pool.generate(**arguments, request_id=name)
                return {"token_ids": result.token_ids, "cached_tokens": result.usage.cached_tokens}
            sequence = Sequence(pool, name, 0, keep=True)  # without asking first, as a stranger would
            if method == "generate":
                return sequence.generate(**arguments).token_ids
            made = getattr(sequence, method)(**arguments)
            if method in ("pin", "publish"):
                return made
            return made.num_tokens if method == "fork" else sequence.num_tokens

        for method, name, arguments in operations:
            try:
                results.append(perform(method, name, arguments))
            except KVPoolError as error:
                results.append(error.code)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
