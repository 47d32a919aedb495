"""The names of the training methods, for the command line, the sweep and their errors. Nothing here imports torch."""

LOG2_LR = {
    "beyond_mup": -4.0,
    "moga_row": -4.0,
    "moga_column": -4.0,
    "muon": -2.0,
    "moonlight": -5.0,
    "scion": -11.0,
    "lion": -7.0,
    "sign_sgd": -7.0,
    "sign_natural": -4.0,
    "hyperball": -3.0,
    "frobenius_sphere": -3.0,
    "adamw": -6.0,
    "mup_adamw": -6.0,
}
"""Every method, and a sensible log2 of its learning rate: where a search starts, and `train`'s default."""

METHODS = tuple(LOG2_LR)
BASELINES = ("adamw", "mup_adamw")
"""Methods that run torch's own optimizer; the others are recipes."""
RECIPES = tuple(name for name in METHODS if name not in BASELINES)
