import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config import Config, configure, prepare_folders
from launch.people import Person
from launch.supervisor import Supervisor
from tests.workers import WORKER

PORT_BASE = str(24500 + 100 * WORKER)


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A state folder that other users can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="sandkeep-launch-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def config(state_dir: Path) -> Iterator[Config]:
    """A platform of its own, with nothing started."""
    config = configure({"PORT_BASE": PORT_BASE}, state_dir=state_dir)
    yield config
    shutil.rmtree(config.run_dir, ignore_errors=True)


@pytest.fixture
def who(config: Config) -> Person:
    """The ordinary user of that platform."""
    if os.geteuid() != 0:
        pytest.skip("needs root, as bin/test has it")
    return prepare_folders(config)


@pytest.fixture
def supervisor(config: Config, who: Person) -> Iterator[Supervisor]:
    supervisor = Supervisor(config)
    yield supervisor
    supervisor.stop()
