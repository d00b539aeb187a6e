"""Measured figures: `python -m tests.bench`. Off by default: nothing here is a test but test_bench.py."""
