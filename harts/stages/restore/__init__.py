"""Compact hidden states in, log-probs in the original order out."""
