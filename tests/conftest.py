"""Put the repository root on sys.path, so that tests share helpers as `tests.support`. The asserts there are tests too,
also where Python is told to leave asserts out."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.register_assert_rewrite("tests.support", "tests.ptx")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell script started us in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, and processes that they start, need it
