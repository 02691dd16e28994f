"""Attacks that test this room's claims: they recover what leaves in the clear, and not what is protected."""
