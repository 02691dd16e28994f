"""Flower Strategy subclasses: one method a file. registry.py finds them by name."""
