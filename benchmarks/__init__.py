"""Measurements, not tests: `python -m benchmarks` runs them all and prints one table."""
