"""Reports of a run: metrics file, progress line, result tables, trace, plots.

Entry points: `MetricsLog` and `LiveProgress` (progress), `chrome_trace` and `read_trace` (chrome_trace), `explain`
(explain), `draw_curves` and `draw_timeline` (plots; imports matplotlib, so import it only when needed).
May import checkpoints, data and config.
"""
