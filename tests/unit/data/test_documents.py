"""Documents: what is damaged is named with file and line, and nothing is left out in silence."""

import pytest

from surefoot.experiment.data.documents import documents
from surefoot.experiment.errors import DataError


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(r'{"text": "hello \ud83d world \udc00"}' "\n" r'{"text": "\ud83d\ude00"}' "\n")
    assert list(documents(str(path))) == ["hello � world �", "\U0001f600"]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 200_000, '"\\ud83d'], ids=["digits", "depth", "half"])
def test_a_line_that_cannot_be_read_is_named(value, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two", "more": ' + value + "}\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 2 is not JSON .*: repair or remove this line"):
        list(documents(str(path)))
