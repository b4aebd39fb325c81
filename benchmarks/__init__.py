"""Benchmarks: `make bench`. What is measured, and how to read it: docs/explanation/benchmarks.md."""
