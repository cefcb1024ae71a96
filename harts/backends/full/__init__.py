"""Full-attention backends."""
