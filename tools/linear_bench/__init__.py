"""Workloads, baselines, parity and timing of tools/bench_linear.py."""
