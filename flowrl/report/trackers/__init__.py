"""Trackers: programs besides flowrl that show the metrics and the generated text of runs.

Entry points: `Tracker`, the interface (tracker.py), and `check_trackers` and `open_trackers` (open_trackers.py). A
tracker is a module: TensorBoard, Weights & Biases, Trackio. Only `open_trackers` imports them, when they are used.
May import `flowrl.checkpoints.run_folder`, `flowrl.config`, `flowrl.data.metric`, `flowrl.report.rollout_log` and
`flowrl.report.rollout_text`.
"""
