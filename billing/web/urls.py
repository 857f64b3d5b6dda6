"""Paths of `billing/web`."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
