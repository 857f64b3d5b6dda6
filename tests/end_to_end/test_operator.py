"""What an operator types on a host, against the platform that runs."""

import os
import subprocess

import pytest

from launch.config import load
from tests.end_to_end.conftest import Platform

pytestmark = [pytest.mark.guest, pytest.mark.timeout(300)]


def manage(platform: Platform, *arguments: str) -> str:
    config = load({"STATE_DIR": str(platform.state_dir)})
    environment = {**os.environ, "STATE_DIR": str(platform.state_dir)}
    environment |= {"QUEUE_URL": config.env["REDIS_URL"]}
    done = subprocess.run(
        [config.python, "-m", "launch.manage", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_commands_of_a_host_work_as_they_are_documented(platform: Platform) -> None:
    assert "deleted" in manage(platform, "collect")
    assert "deleted" in manage(platform, "collect", "--orphans")
    assert "wrapped anew" in manage(platform, "rotate_master_key")
    assert "brought up to date host local" in manage(platform, "register_host")
