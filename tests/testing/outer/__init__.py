"""Masters, shards, clusters and their links in one process or in several, for tests of the outer optimizer."""
