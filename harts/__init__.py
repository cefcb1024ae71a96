"""HARTS: prefix-sharing RL training for hybrid-attention models."""
