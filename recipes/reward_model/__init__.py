"""Training of a reward model on preference pairs."""
