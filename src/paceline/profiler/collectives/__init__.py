"""Records collectives, and separates waiting from transfer."""
