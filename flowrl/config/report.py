"""Which optional files a run writes about itself."""

from flowrl.config.base import Config


class ReportConfig(Config):
    """Optional outputs of a run. `metrics.jsonl`, `trace.json` and `summary.json` are always written."""

    plots: bool = True
    """Draws `curves.png` and `timeline.png` when the run ends."""

    tensorboard: bool = True
    """Writes every metric to TensorBoard events in `tensorboard/`."""
