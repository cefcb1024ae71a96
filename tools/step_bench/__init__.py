"""Models, workloads, parity, timing and breakdown of tools/bench_step.py."""
