"""App layer."""
