"""Objectives, one training step over a plan, and its comparison with another plan."""
