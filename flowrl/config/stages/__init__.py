"""Base classes of recipe configs, by the source of the training data.

Entry points: `EpochConfig` (epochs over a file), `RolloutRunConfig` (generated responses), `OnPolicyConfig` (scored
responses, policy gradients) and `EvaluationRunConfig` (evaluation without training). May import `flowrl.config`.
"""
