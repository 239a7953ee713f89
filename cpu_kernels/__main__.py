"""Fills a cache of kernels: `python -m kvpool.cpu_kernels CACHE` makes what its standard input names, a line each, and
says so when it is done. See `side_by_side`."""

from __future__ import annotations

import sys
from pathlib import Path

from .compiler import make

for line in sys.stdin:
    make(line.strip(), Path(sys.argv[1]))
    print(line.strip(), flush=True)
