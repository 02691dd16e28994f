"""Reports and comparisons: what a finished run shows to a person."""
