"""The optimizer: `SteepestDescent`, its parameter groups, batches of like parameters, running bounds, precision."""
