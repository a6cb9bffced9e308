"""The live page of a folder of runs. It only reads records and never contacts a running process."""
