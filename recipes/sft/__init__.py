"""Supervised fine-tuning: imitate the answers of a file."""
