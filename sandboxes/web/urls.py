"""Paths of `sandboxes/web`."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
