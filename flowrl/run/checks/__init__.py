"""The checks of a run's config. They are one list, in which each check has a cost level and needs (check_list.py).

A start runs the levels CONFIG and FILES before it reads data and loads models. It stops at the first error. `flowrl
plan` and `flowrl eval` run the checks of these levels whose needs they meet, and `flowrl check` runs all levels.
`flowrl doctor` (flowrl/run/doctor.py) is not part of this list, because it starts processes and compares the results of
two engines.

Entry points: `check_start`, `check_placement` and `run_checks` (check_list.py), `CheckedRun` (checked_run.py: a config
with its placement plan and fitted memory, each computed once), `check_config` (check_report.py: `flowrl check`).
May import every package of flowrl except `flowrl.cli` and `flowrl.inference`.
"""
