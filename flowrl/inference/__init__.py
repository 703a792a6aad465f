"""Uses trained models: finds the model of a run, a checkpoint or an adapter, generates, chats, and serves.

Entry points: `resolve_model` (model_source.py), `TextGenerator` (text_generator.py), `run_job` (generation_job.py),
`ChatTerminal` (chat_terminal.py) and `serve` (model_server.py). May import `flowrl.algorithms`, `flowrl.checkpoints`,
`flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.engines`, `flowrl.rewards`, `flowrl.run` and
`flowrl.workers`.
"""
