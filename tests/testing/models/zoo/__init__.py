"""The zoo: models as people bring them, in functions that return them with a batch; a file for each family."""
