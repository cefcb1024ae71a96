"""One file a model family: what the hooks have to know of it."""
