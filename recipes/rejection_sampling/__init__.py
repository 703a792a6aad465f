"""Rejection sampling: supervised fine-tuning on the best of several responses to each prompt."""
