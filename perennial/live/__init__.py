"""Pages on which people watch and steer a federation: the operator's, and a hospital's."""
