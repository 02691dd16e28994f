"""Attacks that test this room's claims: what leaves in the clear comes back, what is protected does not."""
