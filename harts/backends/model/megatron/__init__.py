"""Models of Megatron-core on compact rows."""
