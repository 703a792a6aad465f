"""Reports of a run: metrics file, generated text, progress bar, result tables, trace and an HTML page.

Entry points: `MetricsLog` and `LiveProgress` (progress), `RolloutLog` and `read_rows` (rollout_log), `show_rows`
(rollout_text), `RecordedCalls` (trace), `chrome_trace` and `read_trace` (chrome_trace), `explain` (explain),
`draw_curves` (plots), `write_report` (page), `compare_runs` (run_diff), `first_difference`
(value_diff). Import plots only when needed, because it imports matplotlib.
May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.data` and `flowrl.health`.
"""
