"""Methods that were measured and do not pay, or only repeat a publication: tested, but may change or go.

Nothing else in the package uses them except the command line, whose names of recipes and stabilisers stay.
"""

from surefoot.contrib.decay import CautiousDecay, IndependentDecay
from surefoot.contrib.directions import DualScaled, MeanLookahead, RadialBrake, UpdateFloor
from surefoot.contrib.momentum import ScheduledMomentum, Whitened
from surefoot.contrib.recipes import frobenius_sphere, muon_squared, shampoo_muon, sign_natural, signum

__all__ = [
    "CautiousDecay", "DualScaled", "IndependentDecay", "MeanLookahead", "RadialBrake", "ScheduledMomentum",
    "UpdateFloor", "Whitened", "frobenius_sphere", "muon_squared", "shampoo_muon", "sign_natural", "signum",
]  # fmt: skip
