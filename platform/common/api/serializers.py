"""Serializers that refuse what they do not know."""

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers


class StrictSerializer(serializers.Serializer[Any]):
    """Refuses unknown fields, naming each: a typo, or a feature that is not there yet.

    A nested serializer must be strict as well; its fields are named by their path.
    """

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = {name for name, field in self.fields.items() if not field.read_only}
            if unknown := [name for name in data if name not in known]:
                raise serializers.ValidationError(
                    {str(name): ["This field is not known here."] for name in unknown}
                )
        return super().to_internal_value(data)
