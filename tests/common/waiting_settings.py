"""The tests' settings for a server process with views that wait."""

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.common.waiting_site"
