"""Profiler layer."""
