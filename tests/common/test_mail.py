"""Mail in development can be read."""

import stat
from pathlib import Path

import pytest
from django.conf import settings
from django.core.mail import EmailMessage, get_connection


def test_mail_is_printed_and_kept_in_a_file_for_the_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log" / "mail.log"
    monkeypatch.setattr(settings, "MAIL_FILE", file)
    connection = get_connection("common.mail.ConsoleAndFileBackend")

    for word in ("first", "second"):
        EmailMessage(
            word, f"the {word} link", to=["a@example.com"], connection=connection
        ).send()

    kept = file.read_text()
    assert "the first link" in kept
    assert "the second link" in kept
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "the first link" in capsys.readouterr().out
