"""Runs on machines that this command starts: over ssh (`--hosts`) or emulated (`--cluster`)."""
