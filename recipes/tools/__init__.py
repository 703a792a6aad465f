"""Products of two-digit numbers: a small model learns to call a calculator."""
