"""Weight sync: sends the actor's weights to the rollout after each update, and verifies the received weights.

Entry points: `WeightSync` and the `WeightTransfer` implementations (transfer.py);
`RolloutWatch` and `WeightsCheck` (verification.py).
May import `flowrl.config` and `flowrl.controller`.
"""
