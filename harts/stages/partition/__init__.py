"""A compact trie in, candidate partitions into microbatches out."""
