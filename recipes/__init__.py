"""Training programs, with one folder per algorithm or stage."""
