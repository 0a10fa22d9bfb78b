"""Sim layer."""
