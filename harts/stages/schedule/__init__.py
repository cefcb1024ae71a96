"""Candidate partitions in, one segment tree a microbatch out."""
