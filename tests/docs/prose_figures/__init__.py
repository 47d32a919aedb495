"""Every figure that the prose of the pages takes from a table: sentences and cells.

CONTRIBUTING.md says how to add one.
"""

from prose_figures import measured, other_recipes, overview, transfer

FIGURES = [*overview.FIGURES, *measured.FIGURES, *transfer.FIGURES, *other_recipes.FIGURES]
