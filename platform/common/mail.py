"""Mail in development: printed, and kept in a file that one can read."""

import threading
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.core.mail.backends.console import EmailBackend
from django.core.mail.message import EmailMessage

_file_lock = threading.Lock()


class ConsoleAndFileBackend(EmailBackend):
    """Writes each message to the console and appends it to MAIL_FILE."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        sent: int = super().send_messages(email_messages) or 0
        path = Path(settings.MAIL_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock, path.open("a", encoding="utf-8") as file:
            # It holds links that sign people in.
            path.chmod(0o600)
            for message in email_messages:
                file.write(message.message().as_string() + "\n" + "-" * 79 + "\n")
        return sent
