"""Pages that people watch and steer a federation with: the operator's, and a hospital's."""
