"""Nim of textarena against a fixed opponent, learned by a small model."""
