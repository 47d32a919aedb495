"""Processes of a mesh: which part of a tensor each holds, who computes what, and how whole tensors travel."""
