"""Trains stories in all stages: SFT, a reward model, PPO with ptx, and DPO. Then compares the policies.

Usage: `python -m recipes.pipeline.run [key=value ...] [STAGE.key=value ...]`
"""

import sys
from collections.abc import Sequence

from flowrl.cli import exit_code
from flowrl.config import import_function
from recipes.pipeline.config import read_settings


def main(words: Sequence[str]) -> int:
    """Runs the pipeline with settings of the command line, and returns the exit code."""

    def program() -> None:
        pipeline, configs = read_settings(words)
        # A wrong setting is reported before these imports, which take seconds.
        import_function("recipes.pipeline.stages:run_pipeline")(pipeline, configs)

    return exit_code(program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
