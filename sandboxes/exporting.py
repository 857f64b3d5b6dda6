"""What a host's worker does to send a disk as a file. Safe to repeat."""

from datetime import timedelta

from hosts import local
from hosts.services import begin_reading
from hosts.volumes.commit import load_root
from sandboxes.models import Cut

READING = timedelta(hours=12)
"""Longer than any download; what it reads is kept for as long, whatever is deleted."""


def serve_image(cut_id: str) -> None:
    """Have the generation of a finished cut sent to the first that asks the gate for it.

    Raises:
        Unavailable: not now; the message comes again.
    """
    cut = Cut.objects.select_related("generation").filter(pk=cut_id).first()
    if cut is None or cut.generation is None:
        return
    root_key = begin_reading(cut.generation, span=READING)
    keyring = local.keyring()
    root = load_root(local.object_store(), root_key, keyring)
    keyring.learn(root.volumes())
    local.image_exports().start(cut.pk, root_key=root_key, keys=keyring.in_hex())
