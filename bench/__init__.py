"""Benchmarks: every op beside what it replaces, in one process. `python -m bench --help`."""
