"""Unmodified models of transformers on compact rows."""
