"""Uses trained models: finds the model of a run, a checkpoint or an adapter, generates, chats, serves, and exports.

Entry points: `resolve_model` (model_source.py), `TextGenerator` (text_generator.py), `run_job` (generation_job.py),
`ChatTerminal` (chat_terminal.py), `serve` (model_server.py), `export_checkpoint` (checkpoint_export.py) and
`write_model_card` (model_card.py). May import `flowrl.algorithms`, `flowrl.checkpoints`, `flowrl.config`,
`flowrl.controller`, `flowrl.data`, `flowrl.engines`, `flowrl.health`, `flowrl.report`, `flowrl.rewards`, `flowrl.run`
and `flowrl.workers`.
"""
