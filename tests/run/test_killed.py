import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_run_killed_while_saving_keeps_all_earlier_checkpoints(tmp_path: Path) -> None:
    code = "import sys; from tests.checkpoints.saving_loop import main; from pathlib import Path;"
    code += "sys.exit(main(Path(sys.argv[1]), 20))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.match(r"20 kills, 0 lost, (\d+) while saving", done.stdout)
    assert counts is not None, done.stdout
    assert int(counts[1]) >= 3, "kills that hit no save show nothing"
