"""Data of preference training: tokenized pairs and labeled responses, the inputs of their losses, and evaluation.

Entry points: `PreferenceExamples`, `preference_inputs`, `store_reference` and `evaluate_preferences`.
May import `flowrl.algorithms`, `flowrl.checkpoints`, `flowrl.config`, `flowrl.data`, `flowrl.run` and `flowrl.workers`.
"""
