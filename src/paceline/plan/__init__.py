"""Performance planning: predict step times of larger worlds from measurements of small ones.

calibration.py holds what was measured, prediction.py is the entry point. docs/planning.md explains
the model. Only measurement.py imports torch.
"""
