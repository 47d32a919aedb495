"""The public names in one place; `surefoot/__init__.py` imports them when one is first used."""

from surefoot import geometry, recipes, views
from surefoot.attention.qk_clip import LogitControl
from surefoot.conversion import Setting, convert, from_adamw
from surefoot.discovery.overrides import per_head
from surefoot.geometry import (
    RMS,
    Frobenius,
    Geometry,
    HeadRMS,
    MaxNorm,
    MeanOperator,
    RowMean,
    RowRMS,
    Spectral,
    check,
    dual_norm,
)
from surefoot.linalg.clip import mclip
from surefoot.linalg.polar import msign
from surefoot.momentum import Momentum
from surefoot.monitor.activations import measure
from surefoot.optim.optimizer import SteepestDescent
from surefoot.optim.precision import MasterWeights, Precision, RoundToNearest, StochasticRounding
from surefoot.plan import Placement, Plan
from surefoot.recipes import Recipe
from surefoot.roles import Role
from surefoot.scaling import Constant, Keller, Moonlight, Natural
from surefoot.stabilise import (
    Free,
    Normalise,
    PostClip,
    PreDecay,
    Rescale,
    SpectralSphere,
    Stabiliser,
    Stiefel,
    StreamingPostClip,
    StreamingPreDecay,
    WeightDecay,
)
from surefoot.step import compiled

__all__ = [
    "RMS",
    "Constant",
    "Free",
    "Frobenius",
    "Geometry",
    "HeadRMS",
    "Keller",
    "LogitControl",
    "MasterWeights",
    "MaxNorm",
    "MeanOperator",
    "Momentum",
    "Moonlight",
    "Natural",
    "Normalise",
    "Placement",
    "Plan",
    "PostClip",
    "PreDecay",
    "Precision",
    "Recipe",
    "Rescale",
    "Role",
    "RoundToNearest",
    "RowMean",
    "RowRMS",
    "Setting",
    "Spectral",
    "SpectralSphere",
    "Stabiliser",
    "SteepestDescent",
    "Stiefel",
    "StochasticRounding",
    "StreamingPostClip",
    "StreamingPreDecay",
    "WeightDecay",
    "check",
    "compiled",
    "convert",
    "dual_norm",
    "from_adamw",
    "geometry",
    "mclip",
    "measure",
    "msign",
    "per_head",
    "recipes",
    "views",
]
