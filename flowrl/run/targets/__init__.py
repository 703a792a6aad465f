"""Targets of training on a policy's own responses: the best of several responses, and the distributions of a teacher.

Entry points: `select_best`, `teacher_columns` and `evaluate_agreement`.
May import `flowrl.algorithms`, `flowrl.config`, `flowrl.data`, `flowrl.rewards`, `flowrl.run`, `flowrl.schedules` and
`flowrl.workers`.
"""
