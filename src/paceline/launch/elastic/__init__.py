"""Runs that outlive the loss of workers and nodes: `paceline train --elastic`."""
