"""Samples, sites and tasks: where data comes from, who holds it, and in which order its classes appear."""
