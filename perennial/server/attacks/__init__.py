"""The attacks of `perennial attack` on a finished run."""
