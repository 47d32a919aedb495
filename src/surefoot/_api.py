"""The public names in one place; `surefoot/__init__.py` imports them when one is first used."""

from surefoot import geometry, recipes, views
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.scale import scale_attention_
from surefoot.conversion import Setting, convert, from_adamw
from surefoot.discovery.overrides import per_head
from surefoot.geometry import *
from surefoot.initialise import AsBuilt, Fill, HeadNormal, Initial, LinearNormal, UnitNormal
from surefoot.linalg.clip import mclip
from surefoot.linalg.polar import msign
from surefoot.momentum import Adam, Momentum, Smoothing
from surefoot.monitor.activations import measure
from surefoot.optim.optimizer import SteepestDescent
from surefoot.optim.precision import MasterWeights, Precision, RoundToNearest, StochasticRounding
from surefoot.plan import Placement, Plan
from surefoot.recipes import Recipe
from surefoot.roles import Role
from surefoot.scaling import Constant, FanIn, Keller, LogRows, Moonlight, Natural, Scale
from surefoot.stabilise import *
from surefoot.step import compiled

__all__ = [
    "RMS", "Adam", "AsBuilt", "ColumnSphere", "Constant", "DecoupledWeightDecay", "FanIn", "Fill", "Free",
    "Frobenius", "Geometry", "HeadNormal", "HeadRMS", "Hyperball", "Identity", "Initial", "Keller",
    "LinearNormal", "LogRows", "LogitControl", "MasterWeights", "MaxNorm", "MeanOperator", "Momentum",
    "Moonlight", "Natural", "Normalise", "Placement", "Plan", "PostClip", "PreDecay", "Precision", "Recipe",
    "Rescale", "Role", "RoundToNearest", "RowMean", "RowRMS", "RowSphere", "Scale", "Setting", "Smoothing",
    "Spectral", "SpectralSphere", "Stabiliser", "SteepestDescent", "Stiefel", "StochasticRounding",
    "StreamingPostClip", "StreamingPreDecay", "TransposedConvSpectral", "UnitNormal", "WeightDecay", "check",
    "compiled", "convert", "dual_norm", "from_adamw", "geometry", "mclip", "measure", "msign", "per_head",
    "recipes", "scale_attention_", "views",
]  # fmt: skip
