"""Checkpoints of Hugging Face models, as models of Megatron-core."""
