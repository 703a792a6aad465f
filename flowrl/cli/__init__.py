"""The `flowrl` command and the exit codes of every program.

Entry points: `main` (the command), `run_recipe` (main function of a recipe), `exit_code`.
May import every package of flowrl.
"""

from flowrl.cli.main import exit_code, main, run_recipe

__all__ = ["exit_code", "main", "run_recipe"]
