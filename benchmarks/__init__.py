"""Benchmarks: `make bench`. docs/explanation/benchmarks.md describes what is measured and how to read it."""
