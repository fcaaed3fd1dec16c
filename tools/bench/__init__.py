"""Benchmarks: ratios against native 0.30.0."""
