"""A process that forks others for tests that kill them, and how it is started."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start_forker(module: str) -> subprocess.Popen[str]:
    """Run a module of the tests that takes a request a line, and answers each with a line."""
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'platform'}"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
