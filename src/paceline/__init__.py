"""Data-parallel PyTorch training that measures itself."""

__version__ = "0.1.0"
