"""Group relative policy optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300)."""
