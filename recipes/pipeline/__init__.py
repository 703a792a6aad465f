"""All stages in one program: SFT, a reward model, PPO with this reward model and ptx, DPO, and their comparison."""
