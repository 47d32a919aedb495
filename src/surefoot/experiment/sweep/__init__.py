"""Learning-rate sweeps: configuration, workers, search, curve fit and summary."""
