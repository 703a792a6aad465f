"""The terminal viewer of `flowrl show`: saved steps, tables of rows, and responses with colored tokens.

Entry point: `view_run` (viewer_app). Only this package imports textual. Import it only if a viewer is opened.
May import `flowrl.checkpoints`, `flowrl.config`, `flowrl.data.console` and `flowrl.report`.
"""
