"""The live page over a folder of runs. It reads records, and touches no running process."""
