"""Measurements side by side, never timed tests: `python -m benchmarks` runs them all and prints one table."""
