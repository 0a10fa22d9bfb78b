"""Runtime layer."""
