"""Adding updates up: exact sums in any order, softmax sums, buffers on disk."""
