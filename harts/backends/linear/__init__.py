"""Linear-attention backends."""
