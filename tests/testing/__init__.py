"""What several tests need: made-up plans, profiles, networks and models, processes, and how long to wait.

Not here: what one folder of tests alone needs (its conftest). Scripts that tests start are beside it (`preloaded`,
`master_process`). Nothing of it is a test.
"""
