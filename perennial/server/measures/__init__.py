"""Measures by which a clinician judges a model, from tables of counts."""
