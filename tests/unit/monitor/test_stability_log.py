"""Lightning's callback where a module has several optimizers, whose steps its trainer counts together."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import surefoot as sf

pytest.importorskip("lightning")


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_optimizer_is_logged_every_so_many_steps_of_its_own(every):
    from surefoot.integrations.lightning import StabilityLog

    logged = []
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    ours = [sf.SteepestDescent(nn.Linear(4, 4), lr=0.1) for _ in range(2)]
    logger = SimpleNamespace(log_metrics=lambda numbers, step: logged.append((step, {*numbers})))
    for optimizers in ([other, ours[0]], ours):
        logged.clear()
        log, count = StabilityLog(), len(optimizers)
        for step in range(6 * count):
            trainer = SimpleNamespace(
                optimizers=optimizers, loggers=[logger], global_step=step, log_every_n_steps=every
            )
            log.on_before_optimizer_step(trainer, None, optimizers[step % count])
        measured = [i for i, each in enumerate(optimizers) if each is not other]
        assert [step for step, _ in logged] == [
            step for step in range(12) if step % 2 in measured and step // 2 % every == 0
        ]
        for step, own in logged:
            suffix = f"/{step % 2}" if len(measured) > 1 else ""
            assert f"stability/forward_lower{suffix}" in own
