"""The programs: one folder per algorithm or stage."""
