"""Follows what a training script calls in torch."""
