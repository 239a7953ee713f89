"""Put the repository root on sys.path, so that tests share helpers as `tests.support`. The asserts there are tests too,
also where Python is told to leave asserts out."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("tests.support", "tests.ptx")
