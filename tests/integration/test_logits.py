"""Attention control on layouts of transformers: the logits of a batch come back to the threshold, head by head.

Models that multiply the logits of words have their heads in other units.
And the plan, QK-clip and the monitor agree on every family's queries, keys and values.
"""

import pytest
import torch
from families_llama import LLAMA_FAMILIES
from families_other import OTHER_FAMILIES
from test_layouts import FUSED, built

import surefoot as sf
from surefoot.attention.qk_clip import LogitControl
from surefoot.attention.qk_pairs import find_pairs
from surefoot.discovery.heads import head_dim_of, parts
from surefoot.monitor.layer_bounds import forward_bound

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIGS = {
    "gpt2, fused and transposed": ("GPT2", {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}),
    "gpt-neox, fused head by head": ("GPTNeoX", {**SMALL, "intermediate_size": 48}),
    "llama, grouped": ("Llama", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}),
    "qwen2, biases": ("Qwen2", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 1}),
    "bert": ("Bert", {**SMALL, "intermediate_size": 48}),
}


def build(family, options, attention="sdpa"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation=attention)
    named = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, named)(config).train()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def measured(model, control):
    handles = control.hold(sf.SteepestDescent(model, lr=0.0))
    control.largest = {}
    model(torch.arange(24).reshape(2, 12) % 32)
    for handle in handles:
        handle.remove()
    (largest,) = control.largest.values()
    return largest


@pytest.mark.parametrize("name", CONFIGS)
def test_each_heads_logits_come_back_to_the_threshold_and_no_further(name):
    model = build(*CONFIGS[name])
    before = measured(model, LogitControl(model))
    assert before.shape == (4,)
    control = LogitControl(model, threshold=float(before.median()))
    (layer,) = control.pairs
    bias = [p for p_name, p in model.named_parameters() if layer in p_name and p.ndim == 1]
    for p in bias:
        torch.nn.init.normal_(p)
    before = measured(model, control)
    sf.SteepestDescent(model, lr=0.0).scale_(control.factors({layer: before}))
    torch.testing.assert_close(measured(model, control), before.clamp(max=control.threshold), rtol=1e-4, atol=0)
    assert before.max() > 1.01 * control.threshold


def test_the_eager_implementation_is_refused_with_the_remedy():
    model = build(*CONFIGS["llama, grouped"], attention="eager")
    LogitControl(model).hold(sf.SteepestDescent(model, lr=0.1))
    with pytest.raises(RuntimeError, match="attn_implementation='sdpa'"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_normalised_queries_need_no_control():
    model = build("Qwen3", {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8})
    with pytest.raises(ValueError, match="need no control"):
        LogitControl(model)


FAMILIES = {name: (kind, config) for name, (kind, config, _) in (LLAMA_FAMILIES | OTHER_FAMILIES).items()}
DISTILBERT = transformers.DistilBertConfig(vocab_size=32, dim=32, n_layers=1, n_heads=4, hidden_dim=48)
FAMILIES["distilbert"] = ("DistilBertForMaskedLM", DISTILBERT)

NORMED, NO_SIZE = {"qwen3", "gemma3", "qwen3_moe"}, {"deepseek_v3", "mamba", "mamba2"}
"""Families without pairs: with norms on their queries; without attention, or a size of heads that it says."""


def model_of(family):
    if family in FAMILIES:
        torch.manual_seed(0)
        return getattr(transformers, FAMILIES[family][0])(FAMILIES[family][1]).eval()
    return built(*FUSED[family][:3])


def heads_of(placed):
    """Rows of the heads that the plan has in a matrix, or None."""
    size = getattr(placed.role.view, "head_dim", None)
    blocks = [block for block in placed.blocks for _ in range(block[0])]
    return size if size and blocks[0][1] == size else None


@pytest.mark.parametrize("family", [*FAMILIES, *FUSED])
def test_all_three_find_the_same_heads(family):
    model = model_of(family)
    plan, names = sf.Plan.of(model), {id(module): name for name, module in model.named_modules()}
    pairs = {}
    if family in NORMED | NO_SIZE:
        with pytest.raises(ValueError, match="give pairs="):
            find_pairs(model)
    else:
        pairs = find_pairs(model)
    planned = {}
    for name, owner in model.named_modules():
        found, size = parts(owner), head_dim_of(owner)
        if size and {"query", "key"} <= found.keys():
            planned[name] = {what: names[id(part.layer)] + ".weight" for what, part in found.items()}
            cut = heads_of(plan[planned[name]["query"]])
            assert cut == (None if family == "codegen" else size), name
        if name in pairs:
            assert pairs[name].head_dim == size
            for side, what in ((pairs[name].query, "query"), (pairs[name].key, "key")):
                assert side.layer is found[what].layer
                assert side.part == found[what].part
        if (before := forward_bound(owner)) is not None and "value" in found:
            check_values(owner, found["value"], before)
    assert pairs.keys() == ({} if family in NORMED else planned).keys()
    assert bool(planned) == (family not in NO_SIZE)


def check_values(owner, value, before):
    """The bound is of the values: it follows them, and not the other matrices of a fused layer."""
    p = value.layer.weight
    blocks = [block.clone() for block in value.view.split(p.detach())]
    for i, matrix in enumerate(matrix for block in blocks for matrix in block):
        matrix.mul_(1 if i == value.part else 100)
    with torch.no_grad():
        p.copy_(value.view.join(blocks, tuple(p.shape)))
    assert forward_bound(owner) == pytest.approx(before)


# --- models that multiply their logits learn as those that do not, since their heads are in other units ---

TINY = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 40, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MULTIPLIED = {
    "Cohere": ("logit_scale", 1),
    "Cohere2": ("logit_scale", 1),
    "Granite": ("logits_scaling", -1),
    "GraniteMoe": ("logits_scaling", -1),
}
DECODER = {
    "vocab_size": 50, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 40,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN = {"MiniCPM3": {"q_lora_rank": 8, "kv_lora_rank": 8}, "Bart": DECODER, "Marian": DECODER}


def of_family(family, **options):
    """A small language model of two blocks, untied unless the options say so."""
    given = {**({} if OWN.get(family) is DECODER else TINY), "num_hidden_layers": 2, "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(**{**given, **OWN.get(family, {}), **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).float()


RATES = {"steady": 2.0**-4, "steady_bounded": 2.0**-4, "scion": 2.0**-14}
"""A learning rate for each."""


def trained_model(model, recipe="steady"):
    """The losses of five steps, and the plan."""
    plan = sf.Plan.of(model, getattr(sf.recipes, recipe)())
    plan.initialise_(model, seed=0)
    optimizer, losses = sf.SteepestDescent(model, plan, lr=RATES[recipe]), []
    for step in range(5):
        tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, plan


def trained(family, factor, recipe, tied):
    """The losses of five steps, the head's weight times the factor, and its placement."""
    attribute, power = MULTIPLIED[family]
    model = of_family(family, **{attribute: factor**power, "num_hidden_layers": 1, "tie_word_embeddings": tied})
    losses, plan = trained_model(model, recipe)
    head = next(name for name in plan if plan[name].role.name == "head")
    return losses, model.get_output_embeddings().weight.detach() * factor, plan[head]


@pytest.mark.parametrize("recipe", RATES)
@pytest.mark.parametrize("family", MULTIPLIED)
def test_a_factor_on_the_logits_changes_no_loss(family, recipe):
    factor = 2.0**-4
    losses, weight, head = trained(family, factor, recipe, tied=False)
    plain, expected, _ = trained(family, 1.0, recipe, tied=False)
    assert losses == pytest.approx(plain, abs=1e-4)
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-5)
    assert "logits are multiplied by 0.0625, by the configuration's " in head.why


@pytest.mark.parametrize("family", ["Cohere", "Granite"])
def test_a_tied_table_is_in_the_head_s_units(family):
    (*_, head), (*_, plain) = (trained(family, factor, "steady", tied=True) for factor in (0.25, 1.0))
    assert head.lr_scales[0] == 4 * plain.lr_scales[0]
    assert "logits are multiplied" not in plain.why


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Cohere2Moe", {"logit_scale": 0.25}),
        ("FalconH1", {"lm_head_multiplier": 0.25}),
        ("GraniteMoe", {"logits_scaling": 4.0}),
        ("HyperCLOVAX", {"logits_scaling": 0.25}),
        ("MiniCPM3", {"dim_model_base": 8, "q_lora_rank": 8, "kv_lora_rank": 8}),  # 32 features over 8
        ("Llama", {"logit_scale": 0.25}),  # which no LLaMA reads
    ],
)
def test_the_constant_of_a_family_is_read(family, options):
    config = getattr(transformers, f"{family}Config")(**TINY, **options, tie_word_embeddings=False)
    with torch.device("meta"):
        plan = sf.Plan.of(getattr(transformers, f"{family}ForCausalLM")(config))
    units = 1 if family == "Llama" else 4
    assert plan["lm_head.weight"].lr_scales == (units * sf.recipes.steady().role("head").lr_scale((50, 32)),)


@pytest.mark.parametrize(
    ("family", "options", "plain"),
    [
        ("Granite", {"embedding_multiplier": 8.0}, {}),
        ("GraniteMoe", {"embedding_multiplier": 4.0, "residual_multiplier": 0.25}, {}),
        ("MiniCPM3", {"scale_emb": 8.0, "scale_depth": 2**-1.5}, {"scale_emb": 1.0, "scale_depth": 2**0.5}),
        ("Bart", {"scale_embedding": True}, {}),  # a module for the table
        ("Marian", {"scale_embedding": True}, {}),  # an attribute of what has the table
    ],
)
def test_a_factor_on_rows_or_branches_changes_no_loss(family, options, plain):
    (multiplied, plan), (expected, _) = (trained_model(of_family(family, **x)) for x in (options, plain))
    assert multiplied == pytest.approx(expected, abs=1e-4)
    assert any(" multiplied by " in plan[name].why for name in plan)


@pytest.mark.parametrize("recipe", ["steady_bounded", "scion"])
def test_a_factor_on_rows_and_branches_changes_no_loss_by_any_recipe(recipe):
    multiplied = of_family("Granite", embedding_multiplier=8.0, residual_multiplier=0.25)
    losses, expected = (trained_model(model, recipe)[0] for model in (multiplied, of_family("Granite")))
    assert losses == pytest.approx(expected, abs=1e-4)


def placed(name, table, **options):
    """The placement of a parameter of an encoder-decoder or causal model, and its rate over that of its role."""
    options = {
        **TINY,
        **DECODER,
        "d_kv": 16,
        "d_ff": 40,
        "num_layers": 1,
        "num_heads": 2,
        "encoder_layers": 1,
        **options,
    }
    config = getattr(transformers, f"{name}Config")(**options)
    ending = "ForConditionalGeneration" if hasattr(transformers, f"{name}ForConditionalGeneration") else "ForCausalLM"
    with torch.device("meta"):
        plan = sf.Plan.of(getattr(transformers, name + ending)(config))
    role = sf.recipes.steady().role(plan[table].role.name)
    return plan[table], plan[table].lr_scales[0] / role.lr_scale(plan[table].shape)


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Afmoe"])
def test_rows_times_the_root_of_the_width_are_in_units_divided_by_it(name):
    options = {"mup_enabled": True} if name == "Afmoe" else {}
    placement, factor = placed(name, "model.embed_tokens.weight", tie_word_embeddings=False, **options)
    assert (placement.role.name, factor) == ("embedding", pytest.approx(32**-0.5))
    assert "rows are multiplied by 5.65685" in placement.why


@pytest.mark.parametrize("name", ["T5", "LongT5", "UMT5", "SwitchTransformers"])
def test_a_tied_head_over_the_root_of_the_width_is_in_units_times_it(name):
    placement, factor = placed(name, "shared.weight")
    assert (placement.role.name, factor) == ("head", pytest.approx(32**0.5))
    assert placed("T5", "shared.weight", scale_decoder_outputs=False)[1] == 1


def test_positions_are_as_large_as_the_rows_of_a_tied_table_once_these_are_multiplied():
    name = "model.decoder.embed_positions.weight"
    (scaled, factor), (_, plain) = (placed("MBart", name, scale_embedding=scale) for scale in (True, False))
    assert scaled.role.name == "tied_positions"
    assert factor == pytest.approx(32**0.5 * plain)
