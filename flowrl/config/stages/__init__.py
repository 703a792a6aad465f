"""Base classes of recipe configs, by the source of the training data.

Entry points: `EpochConfig` (epochs over a file), `RolloutRunConfig` (generated responses) and `OnPolicyConfig` (scored
responses, policy gradients). May import `flowrl.config`.
"""
