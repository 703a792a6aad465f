"""Distillation: a student is trained to agree with a teacher on its own responses."""
