"""Config layer."""
