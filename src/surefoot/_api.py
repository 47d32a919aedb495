"""The public names in one place; `surefoot/__init__.py` imports them when one is first used."""

from surefoot import contrib, geometry, layers, recipes, views
from surefoot.attention.logits import scale_attention_
from surefoot.attention.qk_clip import LogitControl
from surefoot.conversion import Setting, convert, from_adamw
from surefoot.discovery.overrides import per_head
from surefoot.geometry import *
from surefoot.initialise import (
    AsBuilt,
    ExactNorm,
    Fill,
    HeadNormal,
    Initial,
    LinearNormal,
    Orthogonal,
    SquareNormal,
    UnitNormal,
)
from surefoot.linalg.clip import mclip
from surefoot.linalg.polar import msign
from surefoot.momentum import Adam, Momentum, Smoothing
from surefoot.momentum.preconditioning import RowAdam, Whitened
from surefoot.momentum.soap import SOAP
from surefoot.monitor.activations import measure
from surefoot.optim.optimizer import SteepestDescent
from surefoot.optim.precision import MasterWeights, Precision, RoundToNearest, StochasticRounding
from surefoot.plan import Placement, Plan
from surefoot.recipes import Recipe
from surefoot.roles import Role
from surefoot.scaling import (
    Constant,
    FanIn,
    FanRatio,
    HeadScale,
    Keller,
    LogRows,
    LongerSide,
    Moonlight,
    Natural,
    RootFanIn,
    Scale,
)
from surefoot.stabilise import *
from surefoot.step import compiled

__all__ = [
    "RMS",
    "SOAP",
    "Adam",
    "Adaptive",
    "AsBuilt",
    "ColumnSphere",
    "Constant",
    "DecayedPostClip",
    "DecoupledWeightDecay",
    "ExactNorm",
    "FanIn",
    "FanRatio",
    "Fill",
    "Free",
    "Frobenius",
    "Geometry",
    "HeadNormal",
    "HeadRMS",
    "HeadScale",
    "Hyperball",
    "Identity",
    "Initial",
    "Keller",
    "LinearNormal",
    "LogRows",
    "LogitControl",
    "LongerSide",
    "MasterWeights",
    "MaxNorm",
    "MeanOperator",
    "Momentum",
    "Moonlight",
    "Natural",
    "Normalise",
    "NormalisedRows",
    "Oblique",
    "Orthogonal",
    "Placement",
    "Plan",
    "PostClip",
    "PreDecay",
    "Precision",
    "RMSScaled",
    "Recipe",
    "Rescale",
    "Role",
    "RootFanIn",
    "RoundToNearest",
    "RowAdam",
    "RowMean",
    "RowRMS",
    "RowSphere",
    "Scale",
    "Setting",
    "Smoothing",
    "Spectral",
    "SpectralSphere",
    "SquareNormal",
    "Stabiliser",
    "SteepestDescent",
    "Stiefel",
    "StochasticRounding",
    "StreamingPostClip",
    "StreamingPreDecay",
    "StreamingSpectral",
    "TransposedConvSpectral",
    "UnitNormal",
    "VectorMean",
    "WeightDecay",
    "Whitened",
    "check",
    "compiled",
    "contrib",
    "convert",
    "dual_norm",
    "from_adamw",
    "geometry",
    "layers",
    "mclip",
    "measure",
    "msign",
    "per_head",
    "recipes",
    "scale_attention_",
    "views",
]  # fmt: skip

MOVED = (
    "CautiousDecay", "DualScaled", "IndependentDecay", "MeanLookahead", "RadialBrake", "ScheduledMomentum",
    "UpdateFloor",
)  # fmt: skip
"""Names that are `surefoot.contrib`'s now, and are still found here, with a warning."""
