"""Measures that a clinician judges a model by, from tables of counts."""
