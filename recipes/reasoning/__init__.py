"""Tasks of reasoning-gym, learned by a small model with GRPO and dynamic sampling."""
