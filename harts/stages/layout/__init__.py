"""A round plan in, the compact layout out."""
