"""Transport layer."""
