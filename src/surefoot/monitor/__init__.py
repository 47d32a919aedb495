"""Stability numbers of a model: `norms` from its weights (bounds), `activations` from its activations (measured)."""
