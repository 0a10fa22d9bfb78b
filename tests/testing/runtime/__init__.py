"""Coordinators, workers, groups and checkpoints in one process, for tests of the runtime."""
