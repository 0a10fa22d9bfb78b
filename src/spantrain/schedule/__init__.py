"""Schedule layer."""
