"""A classifier in closed form: sums over samples, and the head that they determine."""
