"""Models layer."""
