"""Digests at the server: lent, stored, and replayed for sites that are absent."""
