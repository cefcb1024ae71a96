"""Search over free partitions: compiled loops on the compressed trie, seeded and in integers."""
