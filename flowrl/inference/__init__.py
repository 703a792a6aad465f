"""Uses trained models: finds the model of a run, a checkpoint or an adapter, generates, chats, serves, exports, and
evaluates.

Entry points: `resolve_model` (model_source.py), `TextGenerator` (text_generator.py), `read_job`
(generation_settings.py) and `run_job` (generation_job.py), `ChatTerminal` (chat_terminal.py), `serve`
(serving/model_server.py), `export_checkpoint` (checkpoint_export.py), `write_model_card` (model_card.py) and
`evaluate_models` (evaluation/evaluate_models.py). May import `flowrl.algorithms`, `flowrl.checkpoints`,
`flowrl.config`, `flowrl.controller`, `flowrl.data`, `flowrl.devices`, `flowrl.engines`, `flowrl.health`,
`flowrl.memory`, `flowrl.report`, `flowrl.rewards`, `flowrl.run` and `flowrl.workers`.
"""
