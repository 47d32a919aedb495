"""The largest logits against loops in float64, and the factors that reduce them."""

import math

import pytest
import torch
from attention_helpers import random

from surefoot.attention import logits


def by_loops(q, k, scale, allowed):
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    largest = [0.0] * heads
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (q.shape[0], heads, q.shape[2], k.shape[2]))).tolist():
        if allowed(b, h, i, j):
            logit = scale * float(q[b, h, i].double() @ k[b, h // group, j].double())
            largest[h] = max(largest[h], abs(logit))
    return torch.tensor(largest)


@pytest.mark.parametrize("chunk", [2, 512])
def test_logits_are_those_of_every_pair_that_may_attend(monkeypatch, chunk):
    monkeypatch.setattr(logits, "CHUNK", chunk)
    q, k = random(2, 4, 5, 3), random(2, 2, 7, 3, seed=1)
    mask = random(2, 1, 5, 7, seed=2) > 0
    added = torch.where(mask, random(2, 1, 5, 7, seed=3), -math.inf)
    lowest = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    masked = by_loops(q, k, 0.5, lambda b, h, i, j: bool(mask[b, 0, i, j]))
    torch.testing.assert_close(logits.largest_logits(q, k, 0.5), by_loops(q, k, 0.5, lambda *_: True))
    causal = by_loops(q, k, 0.5, lambda b, h, i, j: j <= i)
    torch.testing.assert_close(logits.largest_logits(q, k, 0.5, causal=True), causal)
    for given in (mask, added, lowest):
        torch.testing.assert_close(logits.largest_logits(q, k, 0.5, given), masked)
    assert not torch.allclose(masked, causal)
    assert logits.largest_logits(q[:, :, :0], k, 0.5).tolist() == [0.0] * 4


def test_half_precision_that_overflows_is_the_largest_number_and_not_nothing():
    q = torch.full((1, 1, 2, 64), 60.0, dtype=torch.float16)
    assert logits.largest_logits(q, q, 1.0).tolist() == [torch.finfo(torch.float16).max]
    assert logits.largest_logits(q, q, 0.125).tolist() == [28800.0]  # the product alone, 230400, is no float16
    assert logits.largest_logits(q[0], q[0], 0.125).tolist() == [28800.0]


def test_factors_multiply_to_what_each_head_needs_and_raise_nothing():
    largest = torch.tensor([400.0, 50.0, 200.0, 800.0, math.inf, math.nan, 0.0, 100.0])
    for key_heads in (8, 4, 2, 1):
        query, key = logits.logit_factors(largest, 100.0, key_heads)
        wanted = torch.tensor([0.25, 1, 0.5, 0.125, 1, 1, 1, 1])
        torch.testing.assert_close(query * key.repeat_interleave(8 // key_heads), wanted)
        assert query.max() <= 1
        assert key.max() <= 1
    torch.testing.assert_close(*logits.logit_factors(largest, 100.0, 8))


def test_any_batch_has_the_largest_of_all_its_parts():
    q, k, mask = random(2, 3, 4, 5, 6), random(2, 3, 2, 7, 6, seed=1), random(3, 1, 5, 7, seed=2) > 0
    parts = [logits.largest_logits(q[i, j], k[i, j], 0.5, mask[j]) for i in range(2) for j in range(3)]
    assert torch.equal(logits.largest_logits(q, k, 0.5, mask), torch.stack(parts).amax(0))
    assert torch.equal(logits.largest_logits(q[:, :0], k[:, :0], 0.5), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_under_autocast(dtype):
    q, k = 300 * random(1, 2, 3, 4), 300 * random(1, 2, 3, 4, seed=1)
    with torch.autocast("cpu", dtype):
        largest = logits.largest_logits(q, k, 1.0)
    exact = logits.largest_logits(q, k, 1.0).clamp(max=torch.finfo(dtype).max)
    torch.testing.assert_close(largest, exact, rtol=0.02, atol=0)
