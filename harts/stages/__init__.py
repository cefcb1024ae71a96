"""The registered stages: one folder a kind, one file a stage."""
