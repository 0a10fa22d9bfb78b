"""Cli layer."""
