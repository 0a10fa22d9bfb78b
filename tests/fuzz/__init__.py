"""Hostile bytes for everything that reads what others wrote: from the network, and from files."""
