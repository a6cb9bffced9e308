"""Studies: a grid of runs in a YAML file, and the folder in which its cells are run."""
