"""Networks that nobody trains here: what they say of a sample is the same at every site and in every task."""
