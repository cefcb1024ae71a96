"""Attention of compact rows over compact rows: nothing is expanded."""
