"""Everything that runs on torch: linear attention, full attention, whole models."""
