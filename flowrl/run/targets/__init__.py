"""Targets of training on a policy's own responses: the best of several responses, the distributions of a teacher, and
the baselines of advantage estimators.

Entry points: `select_best`, `teacher_columns`, `evaluate_agreement` and `baseline_columns`.
May import `flowrl.algorithms`, `flowrl.config`, `flowrl.data`, `flowrl.rewards`, `flowrl.run`, `flowrl.schedules` and
`flowrl.workers`.
"""
