"""What every room uses: errors, random streams, files. Knows nothing of learning or of Flower."""
