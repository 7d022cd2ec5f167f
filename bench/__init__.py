"""The benchmarks: one module per line, `python -m bench.run [LINE]` runs them, and `results` keeps their records."""
