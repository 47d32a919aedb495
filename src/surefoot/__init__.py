"""Surefoot."""
