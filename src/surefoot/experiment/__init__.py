"""Experiments on the optimizer: reference models, data, training, sweeps, fits and reports."""
