"""Which row of the table of ways a cut parameter takes."""

import pytest
from sharded_cases import plan_of
from torch.distributed.tensor import Shard

import surefoot as sf
from surefoot import recipes
from surefoot.mesh.slabs import slabs
from surefoot.optim import ways

ROWS, COLUMNS = (Shard(0),), (Shard(1),)


@pytest.mark.parametrize(
    ("recipe", "stabiliser", "name", "cut", "way"),
    [
        (recipes.steady(), None, "square", ROWS, ways.DIRECTION),
        (recipes.steady(), None, "embedding", ROWS, ways.HERE),
        (recipes.steady(), None, "experts", ROWS, ways.HERE),
        (recipes.steady(), None, "embedding", COLUMNS, ways.ALL),  # a row's history is of all its columns
        (recipes.steady(), sf.PostClip(1.0), "square", ROWS, ways.WEIGHT),
        (recipes.steady(), sf.Normalise(1.0), "embedding", ROWS, ways.ROWS),
        (recipes.steady(), sf.Stiefel(1.0), "embedding", ROWS, ways.ALL),
        (recipes.mano(), sf.Free(), "square", ROWS, ways.WEIGHT),  # its direction reads the weight
        (recipes.lion(), None, "square", ROWS, ways.HERE),
        (recipes.lion(), sf.RowSphere(), "square", ROWS, ways.WEIGHT),
        (recipes.shampoo_muon(), None, "square", ROWS, ways.ALL),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_cut_parameter_goes_as_far_as_its_step_looks(recipe, stabiliser, name, cut, way):
    placement = plan_of(recipe, stabiliser)[name]
    boxes = slabs(placement.shape, (2,), cut)
    assert ways.chosen(placement, boxes, boxes[0].size)[0] == way


def test_what_is_whole_here_is_stepped_here():
    placement = plan_of(recipes.steady(), sf.Stiefel(1.0))["square"]
    boxes = slabs(placement.shape, (1,), ROWS)
    assert ways.chosen(placement, boxes, boxes[0].size) == (ways.HERE, placement)
