"""The parts of `peers.py`: paceline beside other ways of training on the workers of one machine."""
