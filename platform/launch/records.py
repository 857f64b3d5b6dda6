"""What has to be in the database before the processes start.

Its schema, this machine as a host, and the default template, in one process, since loading
Django takes longer than the work. As root: registering also makes the guests' network.
"""

import sys
from pathlib import Path

import django
from django.core.management import call_command

from launch.progress import step


def main(base_image: Path) -> None:
    """Bring the records up to date; changes nothing that is."""
    django.setup()
    with step("Database schema"):
        call_command("migrate", interactive=False, verbosity=0)
    with step("This machine as a host"):
        call_command("register_host")
    with step("Default template"):
        call_command(
            "import_template",
            "default",
            str(base_image),
            name="Debian",
            description="A small Debian with Git, curl and Python, and room for the rest.",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
