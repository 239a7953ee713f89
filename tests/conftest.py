"""Put the repository root on sys.path, so that tests share helpers as `tests.support`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
