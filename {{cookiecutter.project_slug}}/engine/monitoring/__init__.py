"""Monitoring: console output, progress bars, metrics.csv, curves and experiment trackers."""
