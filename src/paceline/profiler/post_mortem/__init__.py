"""Examines ranks that stop or end."""
