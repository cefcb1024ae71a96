"""The compiled pieces of the search, against naive counts."""
