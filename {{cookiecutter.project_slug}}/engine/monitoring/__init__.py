"""Monitoring: console output, progress bars, metrics.csv, TensorBoard events and curves."""
