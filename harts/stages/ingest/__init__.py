"""Trajectories in, a compact trie out."""
