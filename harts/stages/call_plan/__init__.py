"""A segment tree in, a round plan out."""
