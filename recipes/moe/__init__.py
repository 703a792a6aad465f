"""GRPO of a small mixture of experts, with expert parallelism and router replay."""
