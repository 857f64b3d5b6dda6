"""What the console's forms accept."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from accounts.models import Team
from billing.pricing import memory_price_per_hour
from common.units import DAY, GiB, MiB
from sandboxes.models import DEFAULT_MEMORY_BYTES, Sandbox, Template
from sandboxes.names import check_name
from sandboxes.templates import is_template_id
from sandboxes.templatetags.console import size
from sandboxes.web.spans import NotASpan, format_span, parse_span

TIERS_BYTES = (256 * MiB, 512 * MiB, GiB, 2 * GiB, 4 * GiB, 8 * GiB, 16 * GiB)
SPANS = ("10m", "1h", "8h", "1d", "7d")

MAX_VARIABLES = 100
MAX_ENVIRONMENT_CHARS = 64 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SpanField(forms.Field):
    """A span of time; its value is in seconds, 0 for none."""

    def __init__(self, **kwargs: Any) -> None:
        widget = forms.TextInput(
            {"class": "form-control", "list": "spans", "placeholder": "none", "size": 10}
        )
        super().__init__(required=False, widget=widget, **kwargs)

    def prepare_value(self, value: Any) -> Any:
        return format_span(value) if isinstance(value, int) else value

    def to_python(self, value: Any) -> int:
        """Read what was typed."""
        try:
            return parse_span(str(value or ""))
        except NotASpan as error:
            raise ValidationError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A size of memory that is offered."""

    memory_bytes: int
    price: Decimal
    """In dollars, for an hour of running."""


class MemoryField(forms.TypedChoiceField):
    """A size of memory out of the tiers, and whatever a sandbox has already."""

    def __init__(self, *, also_bytes: int | None = None, **kwargs: Any) -> None:
        offered = {*TIERS_BYTES, also_bytes} if also_bytes else {*TIERS_BYTES}
        self.tiers = [
            Tier(memory_bytes=tier, price=memory_price_per_hour(tier // MiB))
            for tier in sorted(offered)
        ]
        choices = [(tier.memory_bytes, size(tier.memory_bytes)) for tier in self.tiers]
        super().__init__(choices=choices, coerce=int, widget=forms.RadioSelect, **kwargs)


class LifetimeForm(forms.Form):
    """How long a sandbox may run and live."""

    ttl_s = SpanField(
        label="Pause after", help_text="Its files are saved and it sleeps, at no compute cost."
    )
    hard_ttl_s = SpanField(
        label="Delete after", help_text="It and its files are gone for good."
    )
    auto_resume = forms.BooleanField(
        label="Wake it when it is used",
        required=False,
        widget=forms.CheckboxInput({"class": "form-check-input"}),
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or self.cleaned_data
        ttl_s, hard_ttl_s = values.get("ttl_s", 0), values.get("hard_ttl_s", 0)
        if ttl_s and hard_ttl_s and ttl_s > hard_ttl_s:
            self.add_error("ttl_s", "It must not be longer than “Delete after”.")
        return values


class ClaimForm(LifetimeForm):
    """What to start."""

    template_id = forms.ChoiceField(label="Template", widget=forms.RadioSelect)
    snapshot_id = forms.CharField(required=False, max_length=55, widget=forms.HiddenInput)
    env_vars = forms.CharField(
        label="Environment",
        required=False,
        max_length=MAX_ENVIRONMENT_CHARS,
        help_text="One NAME=value a line, seen by every command.",
        widget=forms.Textarea(
            {"class": "form-control font-monospace", "rows": 3, "spellcheck": "false"}
        ),
    )

    def __init__(self, *args: Any, team: Team, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.templates = templates_for(team)
        ready = [template for template in self.templates if template.is_ready]
        field = self.fields["template_id"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [(t.template_id, t.template_id) for t in ready]
        field.initial = ready[0].template_id if ready else None  # the platform's first
        self.fields["memory_bytes"] = MemoryField(
            label="Memory",
            initial=ready[0].memory_bytes if ready else DEFAULT_MEMORY_BYTES,
            also_bytes=ready[0].memory_bytes if ready else None,
        )
        self.fields["auto_resume"].initial = True

    def clean_snapshot_id(self) -> str | None:
        """Return None where it is the template's own disk that is wanted."""
        return self.cleaned_data["snapshot_id"] or None

    def clean_env_vars(self) -> dict[str, str]:
        """Read the lines; an empty one is skipped."""
        variables = {}
        for number, line in enumerate(self.cleaned_data["env_vars"].splitlines(), start=1):
            if not line.strip():
                continue
            name, equals, value = line.partition("=")
            if not equals or _VARIABLE.fullmatch(name.strip()) is None or "\0" in value:
                raise ValidationError(f"Line {number} is not NAME=value.")
            variables[name.strip()] = value
        if len(variables) > MAX_VARIABLES:
            raise ValidationError(f"At most {MAX_VARIABLES} variables.")
        return variables


class MemoryForm(forms.Form):
    """Another size of memory for a sandbox."""

    def __init__(self, *args: Any, sandbox: Sandbox, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["memory_bytes"] = MemoryField(
            label="Memory", initial=sandbox.memory_bytes, also_bytes=sandbox.memory_bytes
        )


class MomentForm(forms.Form):
    """What to go back to, or to begin with: a snapshot, or a moment of the history."""

    generation = forms.IntegerField(required=False, min_value=0, max_value=2**31 - 1)
    snapshot_id = forms.CharField(required=False, max_length=55)

    @property
    def names_one(self) -> bool:
        """Whether it says exactly one of the two."""
        has_moment = self.cleaned_data["generation"] is not None
        return has_moment != bool(self.cleaned_data["snapshot_id"])


def _text(**attributes: str) -> forms.TextInput:
    return forms.TextInput({"class": "form-control", "autocomplete": "off", **attributes})


class SnapshotForm(forms.Form):
    """A snapshot to take."""

    name = forms.CharField(
        label="Name", required=False, max_length=255, validators=[check_name], widget=_text()
    )
    description = forms.CharField(label="Note", required=False, max_length=2000, widget=_text())
    kept_s = forms.TypedChoiceField(
        label="Kept",
        coerce=int,
        choices=[
            (0, "Until it is deleted"),
            (DAY, "One day"),
            (7 * DAY, "One week"),
            (30 * DAY, "30 days"),
        ],
        initial=0,
        widget=forms.Select({"class": "form-select"}),
    )


class TemplateForm(forms.Form):
    """A template to make of a sandbox."""

    template_id = forms.CharField(
        label="Id",
        max_length=255,
        help_text="What a claim names: letters, digits, dots and dashes.",
        widget=_text(spellcheck="false", autocapitalize="none"),
    )
    display_name = forms.CharField(
        label="Name", required=False, max_length=255, validators=[check_name], widget=_text()
    )
    description = forms.CharField(label="Note", required=False, max_length=2000, widget=_text())

    def clean_template_id(self) -> str:
        """Return the id in small letters, if it is one."""
        value: str = self.cleaned_data["template_id"].lower()
        if not is_template_id(value):
            raise ValidationError(
                "Letters, digits, '.', '_' and '-', beginning with one of the first two."
            )
        return value


class ImportForm(TemplateForm):
    """A template to make of an uploaded image; the id comes first, the image last."""

    image = forms.FileField(
        label="Image",
        help_text="qcow2 or raw, standing alone: an ext4 file system or a disk with one.",
        widget=forms.ClearableFileInput({"class": "form-control"}),
        error_messages={
            "required": "Choose a file.",
            "empty": "The file is empty.",
        },
    )


def templates_for(team: Team) -> list[Template]:
    """Return what the team can start from: its own before the public one of the same id."""
    found: dict[str, Template] = {}
    for template in Template.objects.visible_to(team).order_by("team_id", "created_at"):
        found.setdefault(template.template_id, template)
    return list(found.values())
