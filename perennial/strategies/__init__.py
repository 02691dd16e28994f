"""Flower Strategy subclasses: one method a file. factory.py finds them by name."""
