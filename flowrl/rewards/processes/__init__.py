"""Separate processes in which the reward functions of users run: `ScoringPool` (pool.py).

A row passes pool.py, the frames of a socket (frames.py) and the main loop of a process (scorer.py). The pool sees a
process as a `ScoringProcess` (process.py), and receives its events from `ProcessEvents` (process_events.py). The
launcher (launcher.py) forks and guards processes, which `isolate` (isolation.py) restricts. `extract_answers`
(answers.py) calls the function `evaluation.extract_answer` in a pool. Environments run in the same kind of processes.

May import only `flowrl.config`, `flowrl.data.folders` and `flowrl.rewards`.
"""
