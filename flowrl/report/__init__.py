"""Reports of a run: metrics file, progress bar, result tables, trace and plots.

Entry points: `MetricsLog` and `LiveProgress` (progress), `chrome_trace` and `read_trace` (chrome_trace), `explain`
(explain), `draw_curves` and `draw_timeline` (plots). Import plots only when needed, because it imports matplotlib.
May import `flowrl.checkpoints`, `flowrl.config` and `flowrl.data`.
"""
