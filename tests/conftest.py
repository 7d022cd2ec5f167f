"""Let the tests use the project's own programs as modules."""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT/'tools'): sys.path.insert(0, str(folder))
