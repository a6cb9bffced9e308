"""The parts of `peers.py`: paceline and other libraries on one machine."""
