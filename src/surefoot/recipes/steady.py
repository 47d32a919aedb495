"""The default recipe: spectral steps on hidden matrices, rows of tables by the history of their gradients.

And the same with SOAP before the matrix sign: a lower loss for more state and time a step.
"""

from dataclasses import replace
from typing import Any

from surefoot.geometry import RMSScaled
from surefoot.initialise import SquareNormal
from surefoot.momentum import SOAP, Momentum, RowAdam
from surefoot.recipes.recipe import Recipe
from surefoot.recipes.rules import DepthRule, HorizonRule
from surefoot.roles import NATURAL, Role, derive
from surefoot.scaling import Constant, FanRatio, HeadSize, Scale, Times
from surefoot.stabilise import DecayedPostClip, DecoupledWeightDecay, PostClip

HIDDEN, TABLES = Momentum(0.9, 0.5), RowAdam(0.9, 0.98)
EMBEDDING, HEAD, QUERIES = 2.0, 20.0, 2.0
GAIN, BIAS, LAST_GAIN = 0.05, 0.1, 8.0
KERNELS = {"conv": 2.0, "patches": 1.0}
DECAY, QUERIES_DECAY = 0.08, 0.2
RADIUS, MATRICES = 2.0, ("linear", "heads", *KERNELS)


def steady(per_head: bool = True) -> Recipe:
    """The default: one learning rate for every width, and nothing else to set.

    | role | step, for `eta = lr` | norm of a step at most | state, bytes a parameter |
    |---|---|---|---|
    | hidden matrix, experts | `eta r sqrt(d_out/d_in) msign(m)`, `r = FanRatio()` | `r eta`, at most 4 eta | 4 |
    | queries, keys | the same of each head `(d_head, d_in)`, `r = 4 / d_head^(1/4)` | `r eta` | 4 |
    | convolution | the same with r = 2, of patches that do not overlap 1 | 2 eta | 4 |
    | embedding, positions | `2 eta h` | 3.4 eta | 4, and 4 a row |
    | LM head, router, tied table | `20 eta h / d` | 34 eta | 4, and 4 a row |
    | gain, scalar | `eta / 20` times the sign; a last gain under an `output_multiplier` 8 eta | as said | 4 |
    | bias | `eta / 10` times the direction of RMS 1 | eta / 10 | 4 |

    Momentum is .9 with look-ahead .5. Row i of a table steps along `h_i = m_i / sqrt(v_i)`, Adam's two means with one
    second moment per row: the signal of its gradients over their noise. By Cauchy-Schwarz `rms(h_i) <= (1 - b1) /
    sqrt((1 - b2) (1 - b1^2/b2)) = 1.70` at every step, for (b1, b2) = (.9, .98), bias correction included. Decay takes
    `0.08 lr` of matrices and tables per step, `0.2 lr` of queries and keys, `0.16 lr` of a kernel with r = 2.

    Queries and keys have a norm for each head: a step of the whole matrix may change one head by `sqrt(heads)` times as
    much. How far steps move a logit, `r^2 sqrt(d_head)` together, is the same for heads of every size, see `HeadSize`.

    Weights that write into a residual stream of L > 4 branches (two blocks of attention and MLP are 4) get 4/L of their
    rate and decay, and sqrt(4/L) of their initial values: the changes of all branches add up, see `DepthRule`. Each
    counts as four in a stream as wide as a tied table, whose rows are small; docs/layers.md says when. Runs of more
    than 400 steps want less decay: `steady().over(steps)`, see `HorizonRule`.

    Args:
        per_head: False gives queries and keys one norm for all heads.

    Returns:
        The recipe.

    Source: the numbers are from studies/search, what they are worth from studies/confirm; see docs/transfer.md.

    >>> steady().role("linear").momentum
    Momentum(beta=0.9, lookahead=0.5)
    >>> round(steady().role("head").step_norm_bound((1, 256, 64)), 2)
    1.7
    """
    table = {kind: replace(role, momentum=HIDDEN, lr_scale=Constant(GAIN)) for kind, role in NATURAL.items()}
    table["bias"] = replace(table["bias"], lr_scale=Constant(BIAS))
    table["last_gain"] = replace(table["gain"], lr_scale=Constant(LAST_GAIN), radius_unit=Constant(LAST_GAIN))
    table["linear"] = _decayed(table["linear"], FanRatio())
    for kind, factor in (("embedding", EMBEDDING), ("head", HEAD)):
        adaptive = replace(table[kind], geometry=RMSScaled(table[kind].geometry), momentum=TABLES)
        table[kind] = _decayed(adaptive, Constant(factor))
    table |= {kind: _decayed(derive("conv", table), Constant(x), x * DECAY) for kind, x in KERNELS.items()}
    if per_head:
        table["heads"] = _decayed(table["linear"], Times(QUERIES, HeadSize()), QUERIES_DECAY, initial=SquareNormal())
    return Recipe("steady" if per_head else "steady_whole", table, DepthRule(), HorizonRule())


def steady_soap(every: int = 1) -> Recipe:
    """`steady` with SOAP on the momentum of hidden matrices before the matrix sign: a lower loss per step.

    `msign(Q (Q^T m / sqrt(V)))` for a wide matrix, Q the basis of its rows, V the running mean of `(Q^T g)^2`; the same
    from the right for a tall one, from both sides for a square one, see `SOAP`. Only the shorter side has a basis, so
    the factors of a head of queries are `d_head^2`, those of an MLP `d^2`. Step lengths, and so all bounds, are those
    of `steady`, and so are all other parameters.

    State: 8 bytes per parameter of a hidden matrix, and `8 d^2` for its shorter side d (`16 d^2` if square): 9.5 per
    parameter of GPT-2 Small. Cost beside the step of `steady`: a Gram matrix, a QR and four products for each side with
    a basis. docs/other-recipes.md has the measured cost and gain.

    Args:
        every: steps from one turn of the bases to the next.

    Returns:
        The recipe.

    Raises:
        ValueError: `every` below 1.

    Source: studies/beyond; N. Vyas et al., "SOAP", 2024, arXiv:2409.11321, before a matrix sign as in "SOAP-Muon".

    >>> steady_soap().role("linear").momentum.of
    Momentum(beta=0.9, lookahead=0.5)
    """
    base = steady()
    turned = {kind: replace(base.table[kind], momentum=SOAP(HIDDEN, every=every, sides="shorter")) for kind in MATRICES}
    return replace(base, name="steady_soap", table={**base.table, **turned})


def steady_bounded() -> Recipe:
    """`steady` under a tight bound: `PostClip` beside its decay, for hidden matrices in units of their step's factor.

    Norms are at most 2 in the unit of the role (`print(plan)` shows it). For a hidden matrix that is
    `2 r sqrt(d_out/d_in)` with the r of `steady`, since steps r times as long lead to weights r times as large; for a
    head 4, whatever its size. All else is as in `steady`. docs/other-recipes.md has the measured cost.

    Returns:
        The recipe.

    Source: studies/sources; "Beyond MuP 4", Post Clip.

    >>> steady_bounded().role("linear").stabiliser.radius
    2.0
    """
    base, table = steady(), {}
    for kind, role in base.table.items():
        bound, decay = PostClip(RADIUS), role.stabiliser
        if isinstance(decay, DecoupledWeightDecay):
            bound = DecayedPostClip(decay.rate, decay.lr_scale, RADIUS)
        unit = Constant(QUERIES) if kind == "heads" else role.lr_scale if kind in MATRICES else role.radius_unit
        table[kind] = replace(role, stabiliser=bound, radius_unit=unit)
    return replace(base, name="steady_bounded", table=table)


def _decayed(role: Role, scale: Scale, rate: float = DECAY, **changes: Any) -> Role:
    """The role with this scale, decay by a part of the rate, and other changes."""
    return replace(role, lr_scale=scale, stabiliser=DecoupledWeightDecay(rate, scale), **changes)
