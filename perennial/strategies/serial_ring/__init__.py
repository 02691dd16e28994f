"""Rounds in which the model goes from site to site."""
