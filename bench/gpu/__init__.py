"""What to run on the day a GPU is at hand: `python -m bench.gpu`, or `make bench-gpu`.

`checks` holds what has to work there, `ceilings` what the device can do at most, `memory` recipes
that take three steps. `parts` lists them, `part` runs one in a process of its own, and `lines`
keeps what each has found, one JSON line a part.
"""
