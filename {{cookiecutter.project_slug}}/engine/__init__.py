"""What the training loop stands on and rarely needs to change. It knows nothing of the task."""
