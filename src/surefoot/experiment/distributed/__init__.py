"""Training by several processes: their mesh, how a model is cut over it, checkpoints that every mesh can read."""

FACTS = "facts.json"
"""The file of a checkpoint folder with everything that is not a tensor."""

UNFINISHED = ".tmp"
"""Suffix of a checkpoint folder that is being written."""
