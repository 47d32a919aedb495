"""Integrations: `config` builds Hugging Face models from their configuration, `torchtitan` is for its trainer.

Each module needs its library; nothing else in the package imports these modules at the top.
"""
