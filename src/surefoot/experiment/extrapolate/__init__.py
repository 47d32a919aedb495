"""The best learning rate at several horizons, batch sizes or depths, and the power law that leads beyond them."""
