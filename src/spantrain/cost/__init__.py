"""Cost layer."""
