"""Sums over samples at the server: asked for once a task, checked, added exactly, kept by site."""
