"""Supervised fine-tuning on conversations with answers."""
