"""Training: configuration, data, rewards, the trainer and what it writes. Importing this package imports no torch."""
