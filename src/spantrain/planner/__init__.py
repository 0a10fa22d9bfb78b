"""Planner layer."""
