"""Testbed layer."""
