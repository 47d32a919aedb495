"""Every printed promise, recipe x stabiliser x role, against gradients that try to break it, by numpy's norms."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

import surefoot as sf
from combinations import combinations
from surefoot.plan import Placement, Plan

from .roles import ALIKE, KINDS, PULLS, RECIPES, ROLES, SCHEMES, Run

NUMBER = r"([\d.]+(?:e[+-]\d+)?)"
TOLERANCE = 1 + 1.5e-3  # in float32, with promises printed to four digits


def natural_norm(kind, w):
    """The weight's norm by its definition."""
    if kind == "linear":
        return math.sqrt(w.shape[1] / w.shape[0]) * np.linalg.norm(w, 2)
    if kind in ("embedding", "head"):
        rows = np.sqrt((w**2).mean(1)).max()
        return rows * (w.shape[1] if kind == "head" else 1)
    return np.abs(w).max() if kind == "gain" else math.sqrt((w**2).mean())


def allowed(promise, initial, frobenius, eta):
    """`(lowest, highest)` norm that the text allows; the Frobenius norm's are about that norm."""
    if "no guarantee" in promise or "no bound" in promise or promise == "free":
        return 0.0, math.inf
    if found := re.search(rf"<= max\(initial, {NUMBER} eta\)", promise):
        return 0.0, max(initial, float(found[1]) * eta)
    if found := re.search(rf"<= max\(initial, {NUMBER}\)", promise):
        return 0.0, max(initial, float(found[1]))
    if found := re.search(rf"norm <= {NUMBER} at every step", promise):
        return 0.0, float(found[1])
    if promise.startswith("each"):  # of lengths: the next test but one
        return 0.0, math.inf
    if "= initial" in promise:
        start = frobenius if promise.startswith("Frobenius") else initial
        return start, start
    found = re.search(rf"norm = {NUMBER}", promise)
    assert found, f"a promise of unknown form: {promise}"
    return float(found[1]), float(found[1])


DECAY = sf.WeightDecay(0.5)


def default(role, scheme, pulls):
    recipe, kind = role
    own = recipe.role(kind)
    promise = Placement(replace(own, stabiliser=scheme) if scheme else own, "", KINDS[kind]).promise
    if pulls != PULLS[::2] or allowed(promise, 1.0, 1.0, 1.0) == (0.0, math.inf):
        return False
    pulled_hard = recipe.name in ("beyond_mup", "lion") and scheme not in ALIKE
    return scheme is None or (kind == "linear" and (scheme == DECAY or pulled_hard))


@combinations(default, role=ROLES, scheme=[None, *SCHEMES], pulls=[PULLS[::2], PULLS[1::2]])
def test_what_is_printed_holds_after_every_step(role, scheme, pulls):
    recipe, kind = role
    for gradients in pulls:
        run = Run(recipe, scheme, kind, gradients)
        promise, start = run.placement.promise, run.p.detach().double().numpy()
        eta = run.lr * run.role.lr_scale(run.placement.blocks[0])
        lowest, highest = allowed(promise, natural_norm(kind, start), np.linalg.norm(start), eta)
        for _, after in run.steps(40):
            w = after.numpy()
            norm = np.linalg.norm(w) if promise.startswith("Frobenius") else natural_norm(kind, w)
            assert norm <= highest * TOLERANCE, promise
            assert norm >= lowest / TOLERANCE or not w.any(), promise
            if promise.startswith("orthogonal") and kind == "linear":
                values = np.linalg.svd(w, compute_uv=False) * math.sqrt(w.shape[1] / w.shape[0])
                np.testing.assert_allclose(values, lowest, rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_only_a_pair_without_a_bound_promises_nothing(scheme):
    for recipe in RECIPES:
        for kind in KINDS:
            promise = Placement(replace(recipe.role(kind), stabiliser=scheme), "", KINDS[kind]).promise
            nothing = promise == "free" or "no bound" in promise or "no guarantee" in promise
            unbounded = sf.Free | sf.StreamingPostClip | sf.StreamingPreDecay | sf.contrib.CautiousDecay
            assert nothing == isinstance(scheme, unbounded), promise


def test_a_step_of_unknown_norm_has_no_promise_under_decay():
    class Long(sf.Spectral):
        def direction(self, g):
            return 3 * super().direction(g)

    role = sf.Role("mine", Long(), weight_norm=sf.Spectral(), stabiliser=sf.WeightDecay(0.5))
    assert Placement(role, "", (4, 4)).promise == "decay by 0.5 lr, no bound: steps of unknown norm"
    assert Plan("mine", {"w": Placement(role, "", (4, 4))}).rows()[0]["promise"].startswith("decay by 0.5 lr")
