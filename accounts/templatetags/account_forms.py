"""Form controls with the classes that the console's style knows."""

from django import forms, template
from django.forms import BoundField
from django.utils.safestring import SafeString

register = template.Library()


@register.filter
def control(field: BoundField) -> SafeString:
    """Write a field's control, for forms that are not ours to give classes."""
    widget = field.field.widget
    if isinstance(widget, forms.CheckboxInput):
        name = "form-check-input"
    elif isinstance(widget, forms.Select):
        name = "form-select"
    else:
        name = "form-control"
    invalid = " is-invalid" if field.errors else ""
    return field.as_widget(attrs={"class": name + invalid})


@register.filter
def is_checkbox(field: BoundField) -> bool:
    """Say whether the field's label stands behind its control."""
    return isinstance(field.field.widget, forms.CheckboxInput)
