"""What lines start in processes of their own: `python -m bench.programs.NAME`."""
