"""Let the tests use the project's own programs as modules."""
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Tests share what they make
ROOMS = 'config model plan parallel checkpoint training rehearsal launching release'.split()
for folder in (ROOT, ROOT/'tools', ROOT/'tests', *(ROOT/'tests'/room for room in ROOMS)):
    sys.path.insert(0, str(folder))

# A shell lets what it starts in the background ignore Ctrl-C, and every process below would inherit
# that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
