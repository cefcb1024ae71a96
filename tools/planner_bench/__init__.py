"""What tools/bench_plan.py is made of."""
