"""`manage.py import_template`: makes a disk image the start of a public template."""

import time
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from common.units import MiB, TiB
from sandboxes.templates import import_public_template


class Command(BaseCommand):
    help = "Import an ext4 image as a public template; the same file again changes nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("template_id")
        parser.add_argument("image", type=Path, help="a raw image of one ext4 file system")
        parser.add_argument("--name", default="", help="what people see")
        parser.add_argument("--description", default="")
        parser.add_argument("--memory-mib", type=int, default=512)
        parser.add_argument(
            "--ceiling-tib", type=int, default=1, help="size that the disk may grow to"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        image: Path = options["image"]
        if not image.is_file():
            raise CommandError(f"{image} is no file")
        started = time.monotonic()
        template, is_new = import_public_template(
            template_id=options["template_id"],
            image=image,
            display_name=options["name"] or options["template_id"],
            description=options["description"],
            memory_bytes=options["memory_mib"] * MiB,
            size_bytes=options["ceiling_tib"] * TiB,
        )
        took_s = time.monotonic() - started
        what = f"imported in {took_s:.1f} s" if is_new else "is up to date"
        self.stdout.write(f"template {template.template_id} {what}")
