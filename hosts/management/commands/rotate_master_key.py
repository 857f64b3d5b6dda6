"""`manage.py rotate_master_key`: wraps every data key with the current master key.

Name the new key by MASTER_KEY_FILE and the old one in MASTER_KEY_FILE_PREVIOUS, restart the
hosts' workers, then run this; when it is done, the old one can be destroyed.
"""

from typing import Any

from django.core.management.base import BaseCommand

from hosts.keys import master_keys, rotate


class Command(BaseCommand):
    help = "Wrap every data key anew with the current master key. Disks are not touched."

    def handle(self, *args: Any, **options: Any) -> None:
        done = rotate()
        key_id = master_keys()[0].key_id
        self.stdout.write(f"{done} data keys wrapped anew; all are under {key_id}.")
