"""Benchmarks: each prints a correctness gate first, and no speed where it is red."""
