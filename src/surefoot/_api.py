"""The public names in one place; `surefoot/__init__.py` imports them when one is first used."""

from surefoot import geometry, recipes, views
from surefoot.activations import measure
from surefoot.attention import LogitControl
from surefoot.conventions import Setting, convert, from_adamw
from surefoot.geometry import (
    RMS,
    Frobenius,
    Geometry,
    HeadRMS,
    MaxAbs,
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
from surefoot.optim import SteepestDescent
from surefoot.overrides import per_head
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
from surefoot.storage import Master, Nearest, Stochastic, Storage

__all__ = [
    "RMS",
    "Constant",
    "Free",
    "Frobenius",
    "Geometry",
    "HeadRMS",
    "Keller",
    "LogitControl",
    "Master",
    "MaxAbs",
    "MeanOperator",
    "Momentum",
    "Moonlight",
    "Natural",
    "Nearest",
    "Normalise",
    "Placement",
    "Plan",
    "PostClip",
    "PreDecay",
    "Recipe",
    "Rescale",
    "Role",
    "RowMean",
    "RowRMS",
    "Setting",
    "Spectral",
    "SpectralSphere",
    "Stabiliser",
    "SteepestDescent",
    "Stiefel",
    "Stochastic",
    "Storage",
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
