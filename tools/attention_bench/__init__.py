"""Problems, candidates, parity and timing of tools/bench_attention.py."""
