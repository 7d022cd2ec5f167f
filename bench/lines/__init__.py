"""One module for each line of the benchmarks, with `measure() -> record`."""
