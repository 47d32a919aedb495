"""Recipes compared on one model: equal tuning, then final runs over fresh seeds, paired."""
