"""Paths of the console's pages of usage."""

from django.urls import path

from billing.web import views

urlpatterns = [
    path("usage/", views.usage, name="usage"),
    path("usage.csv", views.usage_csv, name="usage-csv"),
]
