"""Trackers: other programs that show the metrics and the generated text of runs.

Entry points: `Tracker`, the interface (tracker.py), and `check_trackers` and `open_trackers` (open_trackers.py).
TensorBoard, Weights & Biases and Trackio have one module each. Only open_trackers.py imports these modules, and only if
the run uses them.
May import `flowrl.checkpoints.run_folder`, `flowrl.config`, `flowrl.data.metric`, `flowrl.report.rollout_log`,
`flowrl.report.rollout_text` and `flowrl.report.run_observer`.
"""
