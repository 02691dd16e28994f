"""Read-only pages on which people watch a federation: the operator's, and a hospital's."""
