"""What a sandbox reads first when it starts, kept with its disk's generations.

The export of a disk learns it (see `hosts.volumes.start`); whoever starts from a generation
that has a recording has it fetched ahead. A recording is a list of block numbers, made by a
guest: it can waste a bounded number of requests, and no more.
"""

from hosts import local
from hosts.models import Generation, Volume
from sandboxes.models import Sandbox


def recording_for(sandbox: Sandbox) -> bytes | None:
    """Return what to fetch ahead for a start from the head, None where nothing is known.

    Its own last start says it best; else what others made of the same template read.
    """
    head = sandbox.volume.head
    if head is not None and head.start_blocks is not None:
        return bytes(head.start_blocks)
    template = sandbox.template
    if template is None or template.generation is None:
        return None
    learned = template.generation.start_blocks
    return None if learned is None else bytes(learned)


def remember_start(sandbox: Sandbox) -> bool:
    """Keep what a running sandbox's start has read; tell whether that is known by now.

    The generation that it started from has it from then on if it is a template's, so that
    the next claim is faster; its own head has it until the next commit of a pause.
    """
    learned = local.disks().start_blocks(sandbox.volume_id)
    if learned is None:
        return False
    mine = Generation.objects.filter(heads=sandbox.volume_id, volume=sandbox.volume_id)
    mine.update(start_blocks=learned)
    if sandbox.runtime_generation == 1 and sandbox.template_id is not None:
        fresh = Generation.objects.filter(templates=sandbox.template_id, start_blocks=None)
        fresh.update(start_blocks=learned)
    return True


def recording_of(volume: Volume) -> bytes | None:
    """Return what an attached volume's start has read, for the generation it publishes."""
    return local.disks().start_blocks(volume.pk)
