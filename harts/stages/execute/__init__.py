"""A compact layout in, hidden states of the compact rows out."""
