"""Processes of a mesh: which part of a tensor each holds, which computes what, and the exchange of tensors."""
