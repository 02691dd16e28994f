"""What every room stands on: errors, random streams, files. Knows nothing of learning or of Flower."""
