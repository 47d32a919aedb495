"""The public names in one place; `surefoot/__init__.py` imports them when one is first used."""

from surefoot import contrib, geometry, layers, recipes, views
from surefoot.attention.logits import scale_attention_
from surefoot.attention.qk_clip import LogitControl
from surefoot.conversion import Setting, convert
from surefoot.discovery.overrides import per_head
from surefoot.geometry import *
from surefoot.initialise import AsBuilt, Fill, Initial, LinearNormal, Orthogonal
from surefoot.linalg.clip import mclip
from surefoot.linalg.polar import msign
from surefoot.momentum import SOAP, Adam, Momentum, RowAdam, Smoothing
from surefoot.monitor.activations import measure
from surefoot.optim.adamw import from_adamw
from surefoot.optim.create import create_optimizer
from surefoot.optim.optimizer import SteepestDescent
from surefoot.optim.precision import MasterWeights, Precision, RoundToNearest, StochasticRounding
from surefoot.plan import Plan
from surefoot.recipes import Recipe
from surefoot.roles import Role
from surefoot.scaling import Constant, Moonlight, Run, Scale
from surefoot.stabilise import *
from surefoot.step import compiled

__all__ = [
    "RMS", "SOAP", "Adam", "AsBuilt", "ColumnSphere", "Constant", "DecoupledWeightDecay", "Fill", "Free", "Frobenius",
    "Geometry", "HeadRMS", "Hyperball", "Identity", "Initial", "LinearNormal", "LogitControl", "MasterWeights",
    "MaxNorm", "MeanOperator", "Momentum", "Moonlight", "Normalise", "NormalisedRows", "Orthogonal", "Plan", "PostClip",
    "PreDecay", "Precision", "RMSScaled", "Recipe", "Rescale", "Role", "RoundToNearest", "RowAdam", "RowRMS",
    "RowSphere", "Run", "Scale", "Setting", "Smoothing", "Spectral", "SpectralSphere", "Stabiliser", "SteepestDescent",
    "Stiefel", "StochasticRounding", "StreamingPostClip", "StreamingPreDecay", "StreamingSpectral", "WeightDecay",
    "check", "compiled", "contrib", "convert", "create_optimizer", "from_adamw", "geometry", "layers",
    "mclip", "measure", "msign", "per_head", "recipes", "scale_attention_", "views",
]  # fmt: skip

ELSEWHERE = {
    "surefoot.contrib": (
        "CautiousDecay", "DualScaled", "IndependentDecay", "MeanLookahead", "RadialBrake", "ScheduledMomentum",
        "UpdateFloor", "Whitened",
    ),
    "surefoot.geometry": ("Adaptive", "Oblique", "RowMean", "TransposedConvSpectral", "VectorMean", "dual_norm"),
    "surefoot.initialise": ("ExactNorm", "HeadNormal", "SquareNormal", "UnitNormal"),
    "surefoot.roles": ("Placement",),
    "surefoot.scaling": (
        "FanIn", "FanRatio", "HeadSize", "Keller", "LogRows", "LongerSide", "Natural", "RootFanIn",
    ),
    "surefoot.stabilise": ("DecayedPostClip",),
}  # fmt: skip
"""Modules of names that `surefoot` has but does not list; contrib's give a warning."""
