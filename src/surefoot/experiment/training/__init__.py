"""One training run: its configuration, methods and baselines, the loop, checkpoints and norm logs."""
