"""The training loop of a recipe and its preflight checks.

Entry points: `Run` (loop.py: steps, metrics, evaluation, checkpoints, results), `Advantages` (advantages.py),
`read_prompts` and `SftExamples` (datasets), `check_start` and `check_config` (checks), `with_restarts` (restarts.py).
May import every package of flowrl except `flowrl.cli`.
"""
