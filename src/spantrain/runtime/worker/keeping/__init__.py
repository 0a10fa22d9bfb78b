"""Copies of what other devices hold: for the loss of those, and ahead of a change of plan."""
