"""What a box with a GPU is asked to measure, and how everything that it needs gets there."""
