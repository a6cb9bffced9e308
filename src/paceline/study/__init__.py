"""Studies: a grid of runs in a YAML file, and the folder with its cells."""
