"""Sites in clusters: who belongs together, and one base strategy for each cluster."""
