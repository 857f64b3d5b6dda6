"""Mail in development can be read."""

import stat
from pathlib import Path

import pytest
from django.core.mail import EmailMessage, get_connection
from pytest_django.fixtures import SettingsWrapper


def test_mail_is_printed_and_kept_in_a_file_for_the_owner_alone(
    settings: SettingsWrapper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.MAIL_FILE = tmp_path / "log" / "mail.log"
    connection = get_connection("common.mail.ConsoleAndFileBackend")

    for word in ("first", "second"):
        EmailMessage(
            word, f"the {word} link", to=["a@example.com"], connection=connection
        ).send()

    kept = settings.MAIL_FILE.read_text()
    assert "the first link" in kept
    assert "the second link" in kept
    assert stat.S_IMODE(settings.MAIL_FILE.stat().st_mode) == 0o600
    assert "the first link" in capsys.readouterr().out
