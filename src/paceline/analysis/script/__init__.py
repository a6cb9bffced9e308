"""What a profile shows about a script."""
