"""Policy layer."""
