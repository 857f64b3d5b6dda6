"""Serializers that refuse what they do not know."""

from collections.abc import Mapping
from typing import Any

from django.http import QueryDict
from rest_framework import serializers

Field = serializers.Field[Any, Any, Any, Any]


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses unknown fields, naming each: a typo, or a feature that is not there yet.

    Of a JSON body it refuses values of another type, too, where REST framework would take a
    number for a text: `name: 5`, `ttl: "512"`, `ttl: 5.0`, `auto_resume: "yes"`.

    A nested serializer must be strict as well; its fields are named by their path.
    """

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = {name: field for name, field in self.fields.items() if not field.read_only}
            if unknown := [name for name in data if name not in known]:
                raise serializers.ValidationError(
                    {str(name): ["This field is not known here."] for name in unknown}
                )
            # What comes from a form has texts alone.
            if not isinstance(data, QueryDict):
                _refuse_other_types({known[name]: value for name, value in data.items()})
        return super().to_internal_value(data)


def _refuse_other_types(values: Mapping[Field, Any]) -> None:
    faults = {str(field.field_name): _fault(field, value) for field, value in values.items()}
    if wrong := {name: [fault] for name, fault in faults.items() if fault is not None}:
        raise serializers.ValidationError(wrong)


def _fault(field: Field, value: Any) -> str | None:
    """Say what is wrong with the type of a value; whether it may be null the field says."""
    if isinstance(field, serializers.ListField) and isinstance(value, list):
        faults = (_fault(field.child, each) for each in value if field.child is not None)
        return next(filter(None, faults), None)
    if value is None or _has_type_of(field, value):
        return None
    return str(field.error_messages["invalid"])


def _has_type_of(field: Field, value: Any) -> bool:
    match field:
        case serializers.BooleanField():
            return isinstance(value, bool)
        case serializers.IntegerField():
            return isinstance(value, int) and not isinstance(value, bool)
        case serializers.CharField():
            return isinstance(value, str)
    return True
