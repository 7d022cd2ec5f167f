"""The benchmarks, which `python -m bench.run [LINE]` runs.

`lines` has a module for each, `programs` what they start in processes of their own, `shared` what
several use, and `results` their records.
"""
