"""Our container of optimizers with torchtitan's own models, schedules and checkpoints; its page's code."""

import json
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import surefoot as sf

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of these imports
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton", reason="torchtitan's models import triton, which CPU builds of torch come without")
    from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
    from torchtitan.config import ConfigManager
    from torchtitan.models import deepseek_v3, gpt_oss, llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from surefoot.integrations.torchtitan import SteepestDescentContainer, plan_of

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TOKENS = torch.randint(2048, (4, 9), generator=torch.Generator().manual_seed(1))
WRAPPED = "_checkpoint_wrapped_module"
WQKV = "layers.0.attention.qkv_linear.wqkv.weight"


def build(heads=2):
    """Its debug model, cut to one layer whose four queries share `heads` keys; attention that runs on any machine."""
    config = llama3._debugmodel("flex")
    (layer,) = config.layers = llama3._build_llama3_layers(
        n_layers=1,
        dim=256,
        n_heads=4,
        n_kv_heads=heads,
        hidden_dim=48,
        rope=llama3.ComplexRoPE.Config(dim=64, max_seq_len=64),
        attn_backend="flex",
    )
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights()
    return model


def container(model, lr=2**-4, **options):
    return SteepestDescentContainer.Config(lr=lr, **options).build(model_parts=[model])


def train(model, optimizers, schedule=(), tokens=TOKENS, steps=3):
    """`steps` of torchtitan's loop, and their losses."""
    losses = []
    for _ in range(steps):
        optimizers.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        for each in schedule:
            each.step()
        losses.append(float(loss))
    return losses


def weights(model):
    plain = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name.replace(f"{WRAPPED}.", ""): p.detach().clone() for name, p in plain.items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# --- layouts -------------------------------------------------------------------------------------------------

LAYER = {
    "attention.qkv_linear.wqkv.weight": ("linear", ((1, 256, 256), (1, 128, 256), (1, 128, 256))),
    "attention.wo.weight": ("linear", ((1, 256, 256),)),
    "feed_forward.w1.weight": ("linear", ((1, 48, 256),)),
    "feed_forward.w2.weight": ("linear", ((1, 256, 48),)),
    "feed_forward.w3.weight": ("linear", ((1, 48, 256),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
}
ENDS = {
    "tok_embeddings.weight": ("embedding", ((1, 2048, 256),)),
    "norm.weight": ("gain", ((1, 256),)),
    "lm_head.weight": ("head", ((1, 2048, 256),)),
}
EXPERTS = "moe.routed_experts.inner_experts."
DEEPSEEK = {
    "attention.wq.weight": ("linear", ((1, 3072, 256),)),
    "attention.wkv_a.weight": ("linear", ((1, 512, 256), (1, 64, 256))),
    "attention.kv_norm.weight": ("gain", ((1, 512),)),
    "attention.wkv_b.weight": ("linear", ((1, 2048, 512), (1, 2048, 512))),
    "attention.wo.weight": ("linear", ((1, 256, 2048),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
    EXPERTS + "w1_EFD": ("experts", ((8, 256, 256),)),
    EXPERTS + "w2_EDF": ("experts", ((8, 256, 256),)),
    EXPERTS + "w3_EFD": ("experts", ((8, 256, 256),)),
    "moe.router.gate.weight": ("router", ((1, 8, 256),)),
    "moe.shared_experts.w1.weight": ("linear", ((1, 512, 256),)),
    "moe.shared_experts.w2.weight": ("linear", ((1, 256, 512),)),
    "moe.shared_experts.w3.weight": ("linear", ((1, 512, 256),)),
}
GPT_OSS = {
    "attention.sinks": ("scalar", ((1, 64),)),
    "attention.qkv_linear.wqkv.weight": ("linear", ((1, 4096, 256), (1, 512, 256), (1, 512, 256))),
    "attention.qkv_linear.wqkv.bias": ("bias", ((1, 4096), (1, 512), (1, 512))),
    "attention.wo.weight": ("linear", ((1, 256, 4096),)),
    "attention.wo.bias": ("bias", ((1, 256),)),
    "attention_norm.weight": ("gain", ((1, 256),)),
    "ffn_norm.weight": ("gain", ((1, 256),)),
    EXPERTS + "mlp1_weight_EGD": ("experts", ((16, 2880, 256),)),
    EXPERTS + "mlp1_bias_EG": ("bias", ((16, 2880),)),
    EXPERTS + "mlp2_weight_EDF": ("experts", ((8, 256, 2880),)),
    EXPERTS + "mlp2_bias_ED": ("bias", ((8, 256),)),
    "moe.router.gate.weight": ("router", ((1, 8, 256),)),
    "moe.router.gate.bias": ("bias", ((1, 8),)),
}


def of_layer(plan, number):
    """What the plan says of one layer's parameters, and of those outside the layers."""
    table = {name: (placement.role.name, placement.blocks) for name, placement in plan.placements.items()}
    prefix = f"layers.{number}."
    layer = {name.removeprefix(prefix): row for name, row in table.items() if name.startswith(prefix)}
    return layer, {name: row for name, row in table.items() if not name.startswith("layers.")}


def test_llama_is_placed_as_written_by_hand():
    assert of_layer(plan_of(build()), 0) == (LAYER, ENDS)


@pytest.mark.parametrize(
    ("family", "layer"), [(deepseek_v3, DEEPSEEK), (gpt_oss, GPT_OSS)], ids=["deepseek", "gpt-oss"]
)
def test_mixtures_are_placed_as_written_by_hand(family, layer):
    with torch.device("meta"):
        model = family.model_registry("debugmodel").model.build()
    assert of_layer(plan_of(model), 1) == (layer, ENDS)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_queries_and_keys_are_where_the_layout_says(heads):
    """Logits see their product only: queries doubled and keys halved change nothing, queries alone do."""
    outputs = {}
    for what, factors in {"before": (1, 1), "paired": (2, 0.5), "queries": (2, 1)}.items():
        model = build(heads)
        p = model.layers["0"].attention.qkv_linear.wqkv.weight
        view = plan_of(model)[WQKV].role.view
        with torch.no_grad():
            p.mul_(10)  # attention that is not flat
            q, k, v = view.split(p.clone())
            p.copy_(view.join([q * factors[0], k * factors[1], v], tuple(p.shape)))
            outputs[what] = model(TOKENS)
    torch.testing.assert_close(outputs["paired"], outputs["before"], rtol=1e-4, atol=1e-5)
    assert float((outputs["queries"] - outputs["before"]).abs().max()) > 1e-2


def test_a_pipeline_stage_has_the_head_that_it_holds():
    first, last = build(), build()
    first.lm_head = first.norm = last.tok_embeddings = None
    assert of_layer(plan_of(first), 0) == (LAYER, {"tok_embeddings.weight": ENDS["tok_embeddings.weight"]})
    assert plan_of(last)["lm_head.weight"].role.name == "head"
    optimizers = SteepestDescentContainer.Config(lr=0.1).build(model_parts=[first, last])
    assert len(optimizers) == 2


# --- the container -------------------------------------------------------------------------------------------


def test_it_takes_the_steps_of_the_optimizer_inside():
    ours, theirs = build(), build()
    losses = train(ours, container(ours, seed=3))
    plan = sf.Plan.of(theirs)
    plan.initialise_(theirs, seed=3)
    assert losses == train(theirs, sf.SteepestDescent(theirs, plan, lr=2**-4))
    assert losses[-1] < losses[0] - 0.5
    assert_equal(weights(ours), weights(theirs))


def test_torchtitans_schedule_acts_on_it():
    model = build()
    optimizers = container(model)
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=4)
    rates = []
    for _ in range(4):
        rates.append({group["lr"] for group in optimizers.optimizers[0].param_groups})
        train(model, optimizers, [schedule], steps=1)
    assert rates == [{2**-5}, {2**-4}, {2**-4}, {2**-5}]


def test_a_hook_before_the_step_runs_once():
    """torchtitan balances experts there."""
    model, calls = build(), []
    optimizers = container(model)
    optimizers.register_step_pre_hook(lambda *_: calls.append(1))
    train(model, optimizers, steps=2)
    assert calls == [1, 1]


BOUNDED = {"plan": lambda part: plan_of(part, stabiliser=sf.PostClip(1.0, period=1))}
STREAMING = {"plan": lambda part: plan_of(part, stabiliser=sf.StreamingPostClip(1.0))}
MUON = {"plan": lambda part: plan_of(part, sf.recipes.muon())}


@pytest.mark.parametrize("options", [{}, BOUNDED, STREAMING, MUON], ids=["free", "bounded", "streaming", "muon"])
def test_asking_for_the_state_before_the_first_step_changes_no_weight(options):
    """torchtitan makes the state by a step of rate 0 with zero gradients."""
    model = build()
    optimizers, before = container(model, **options), weights(model)
    assert f"state.{WQKV}.momentum" in optimizers.state_dict()
    assert_equal(before, weights(model))


@pytest.mark.parametrize("options", [{}, BOUNDED], ids=["free", "bounded"])
def test_nor_does_it_change_the_steps_to_come(options):
    """Streaming vectors, and the count of AdamW's steps, are a step further."""
    asked, plain = build(), build()
    optimizers = container(asked, **options)
    optimizers.state_dict()
    assert train(asked, optimizers) == train(plain, container(plain, **options))
    assert_equal(weights(asked), weights(plain))


@pytest.mark.parametrize("options", [{}, BOUNDED, STREAMING, MUON], ids=["free", "bounded", "streaming", "muon"])
def test_a_checkpoint_on_disk_goes_on_bit_for_bit(tmp_path, options):
    """As the trainer saves and loads it: by parameter name, through torch's distributed checkpoints."""
    model = build()
    optimizers = container(model, **options)
    train(model, optimizers)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=tmp_path)
    train(model, optimizers)
    again = build()
    resumed = container(again, lr=0.9, seed=7, **options)
    loaded = {"model": again.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    again.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    train(again, resumed)
    assert_equal(weights(model), weights(again))


def test_a_checkpoint_of_another_plan_is_refused():
    model = build()
    saved = container(model).state_dict()
    other = container(model, plan=lambda part: plan_of(part, stabiliser=sf.PostClip(2.0)))
    with pytest.raises(ValueError, match="another plan"):
        other.load_state_dict({**other.state_dict(), **saved})


def test_options_of_torchtitans_own_optimizers_are_refused():
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
    with pytest.raises(ValueError, match="param_groups, implementation: of torchtitan's own"):
        container(build(), param_groups=groups, implementation="foreach")


# --- over devices --------------------------------------------------------------------------------------------


def wrap(model, mesh):
    """What torchtitan does to a model before it makes the optimizer."""
    for name, layer in model.layers.items():
        model.layers[name] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_on_one_device_the_wrapped_model_moves_as_the_bare_one(one_process):
    bare, wrapped = build(), wrap(build(), one_process)
    assert all(isinstance(p, DTensor) for p in wrapped.parameters())
    assert any(WRAPPED in name for name, _ in wrapped.named_parameters())
    ours, theirs = container(bare, seed=0), container(wrapped, seed=0)
    wrapped._apply(torch.clone)  # parameters moved after the optimizer was made
    assert train(bare, ours) == train(wrapped, theirs)
    assert_equal(weights(bare), weights(wrapped))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def one_of_two(rank, folder):
    """A process of two: half of the batch each, on a replicated model; then a model that is split."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    replicated = wrap(build(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    train(replicated, container(replicated, seed=0), tokens=TOKENS.chunk(2)[rank])
    torch.save(weights(replicated), f"{folder}/{rank}.pt")
    try:
        container(wrap(build(), init_device_mesh("cpu", (2,))))
    except ValueError as error:
        Path(folder, f"{rank}.json").write_text(json.dumps(str(error)))
    dist.destroy_process_group()


def test_two_devices_take_the_step_of_one_and_a_split_parameter_is_refused(tmp_path):
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
    model = build()
    train(model, container(model, seed=0))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert_equal(first, second)
    for name, ours in weights(model).items():
        torch.testing.assert_close(first[name], ours, rtol=1e-3, atol=1e-3)
    for rank in (0, 1):
        message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert re.match(r"tok_embeddings\.weight is split over devices.*data_parallel_replicate_degree", message)


# --- the page ------------------------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    """The section's code as a module that `--module` finds."""
    section = PAGE.read_text(encoding="utf-8").split("\n## torchtitan\n")[1].split("\n## ")[0]
    module = ModuleType("surefoot_page")
    module.sf = sf
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "surefoot_page", module)
    return section


@pytest.mark.parametrize(("config", "recipe"), [("llama3_surefoot", "beyond_mup"), ("llama3_bounded", "moga_row")])
def test_the_pages_configurations_are_torchtitans(page, config, recipe):
    told = re.search(r"`torchtitan\.train (--module) your\.module (--config) \w+ (--optimizer\.lr)", page).groups()
    values = ("surefoot_page", config, "0.03")
    parsed = ConfigManager().parse_args([word for pair in zip(told, values, strict=True) for word in pair])
    json.dumps(parsed.optimizer.to_dict())  # torchtitan logs it
    model = build()
    optimizers = parsed.optimizer.build(model_parts=[model])
    assert parsed.optimizer.plan(model).recipe.startswith(recipe)
    losses = train(model, optimizers)
    assert losses[-1] < losses[0]
