"""Chunk-parallel KDA and GDN over a whole microbatch: chunk work once for all rounds; the recurrence joins them."""
