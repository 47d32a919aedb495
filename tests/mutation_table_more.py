"""More of `mutation_table.py`: layers, blocks, recipes of related work, adaptive directions."""

from mutation_table import MUTATIONS as CORE
from mutation_table import Mutation

RELATED, ADAPTIVE = "tests/oracle/test_related.py", "tests/laws/adaptive/test_adaptive.py"
BLOCKS, DECAYS = "tests/unit/monitor/test_block_bounds.py", "tests/laws/adaptive/test_decay_variants.py"
RECIPES, WORST = "tests/unit/core/test_recipes.py", "tests/laws/promises/test_worst_change.py"
SHARDED, MESHES = "tests/sharded/test_sharded_state.py", "tests/sharded/test_sharded_steps.py"
EIGHT, STEP = "tests/unit/optim/test_precision.py", "tests/unit/optim/test_step.py"
SCHEDULE, SPLIT = "tests/sharded/test_schedule.py", "tests/unit/core/test_equivalence.py"
LAW = "tests/unit/experiment/extrapolation/test_extrapolate_law.py"
COPIED, PASSES = "tests/unit/inputs/test_copied.py", "tests/unit/inputs/test_passes.py"
EPOCHS, LENGTH = "tests/unit/data/test_epochs.py", "tests/unit/core/test_length.py"

INITIAL, EXPERTS = "tests/unit/core/test_plan_initialise.py", "tests/unit/discovery/test_experts.py"
LADDER = "tests/unit/experiment/extrapolation/test_ladder.py"
TAKEOVER = "tests/unit/takeover/test_from_adamw.py"
ADDED, UNSCALED = "tests/unit/discovery/test_added_tables.py", "tests/unit/attention/test_unscaled.py"
MUTATIONS = (
    *CORE,
    Mutation("AdamW's bias kept", "optim/adamw.py", "(bias / (1 - float(theirs) ** count))", "1.0", TAKEOVER),
    Mutation("no look-ahead in the rate", "optim/adamw.py", ", 1 - ahead)", ", 1 - beta)", TAKEOVER),
    Mutation("AdamW's count taken, not copied", "optim/adamw.py", 'old["step"].clone()', 'old["step"]', TAKEOVER),
    Mutation(
        "bounds that cut in silence", "optim/adamw.py", "if over[0] > over[1] else []", "if False else []", TAKEOVER
    ),
    Mutation("keys taken for queries", "discovery/rows.py", "self.products[i][::-1]", "self.products[i]", PASSES),
    Mutation("a gate taken for a projection", "discovery/rows.py", "if name in _SCALES and", "if False and", PASSES),
    Mutation("heads that do not fit", "discovery/structure.py", "sum(sizes) != layer.out_features or ", "", COPIED),
    Mutation(
        "rows by the shorter side", "scaling.py", "sqrt(max(1, *shape[-2:]))", "sqrt(max(1, min(shape[-2:])))", RELATED
    ),
    Mutation("a ratio without a limit", "scaling.py", "min(self.most, max", "min(math.inf, max", RECIPES),
    Mutation("a kernel's taps as a width", "recipes/steady.py", "Constant(x), x", "FanRatio(), x", RECIPES),
    Mutation("rows before columns", "geometry/adaptive.py", "turn % 2 == 0", "turn % 2 == 1", RELATED),
    Mutation(
        "a head without momentum",
        "recipes/published.py",
        '"momentum": Momentum(0.9)}',
        '"momentum": Momentum(0)}',
        RELATED,
    ),
    Mutation("a brake on what shortens", "contrib/directions.py", "outward = -(d * w)", "outward = (d * w)", ADAPTIVE),
    Mutation(
        "a direction's memory of a matrix that rests",
        "geometry/adaptive.py",
        "rate = (1 - self.beta) * active",
        "rate = 1 - self.beta",
        ADAPTIVE,
    ),
    Mutation("the whitening's root", "contrib/momentum.py", "** -0.25", "** -0.5", ADAPTIVE),
    Mutation(
        "a row's sum of squares",
        "momentum/adam.py",
        ".mean(-1, keepdim=True), rate)",
        ".sum(-1, keepdim=True), rate)",
        ADAPTIVE,
    ),
    Mutation("decay without caution", "contrib/decay.py", "d * w >= 0", "d * w <= 0", DECAYS),
    Mutation("a block's bound without biases", "monitor/layer_bounds.py", " + rms(self.bias)\n", "\n", BLOCKS),
    Mutation(
        "the rows of a head with their mean",
        "monitor/layer_bounds.py",
        "else w\n    return",
        "else w; centred = w\n    return",
        "tests/unit/monitor/test_head_loss.py",
    ),
    Mutation(
        "a dependency of rounding",
        "monitor/maxima.py",
        " - error * rounding[differ])",
        ")",
        "tests/unit/monitor/test_rounding.py",
    ),
    Mutation(
        "an MLP that writes to what it reads",
        "monitor/block_bounds.py",
        "not all(node.users for node in calls) or ",
        "",
        "tests/unit/monitor/test_activation_slopes.py",
    ),
    Mutation("the bound of one head", "monitor/layer_bounds.py", ".square().mean())", ".square().amin())", BLOCKS),
    Mutation(
        "an epsilon in In Norm",
        "layers/in_norm.py",
        "    size = _rms(x)\n    return",
        "    size = _rms(x) + 1e-6\n    return",
        "tests/unit/layers/test_in_norm.py",
    ),
    Mutation(
        "smoothness without q",
        "geometry/mean_operator.py",
        "2 / self.q - 1 / self.p",
        "1 / self.q - 1 / self.p",
        "tests/oracle/test_smoothness.py",
    ),
    Mutation(
        "rows not scaled to the norm's unit",
        "geometry/adaptive.py",
        "m * (1 / (norm.scale(",
        "m * (1 / (2 * norm.scale(",
        ADAPTIVE,
    ),
    Mutation(
        "entries without their size", "geometry/adaptive.py", "return d * m.abs(), memory", "return d, memory", ADAPTIVE
    ),
    Mutation(
        "the leading part kept and lost at once", "geometry/change_bounds.py", "* (2 * low - 1))", "* (2 * low))", WORST
    ),
    Mutation(
        "no way back inwards",
        "geometry/change_bounds.py",
        "1 - reach * nuclear / unit",
        "1 + reach * nuclear / unit",
        WORST,
    ),
    Mutation("a rank without a gradient", "optim/shard.py", "there &= ~(missing & copied)", "pass", SHARDED),
    Mutation("zero problems of a part alone", "optim/shard.py", "labels + torch", "labels * 0 + torch", MESHES),
    Mutation("a strided part in the mesh's order", "mesh/slabs.py", "strides[axis] > 1)", "0)", SCHEDULE),
    Mutation(
        "noise by the place in the part", "optim/shard.py", 'if "rounds" in self.kept else 0', "if False else 0", MESHES
    ),
    Mutation(
        "scales of 8 bits not written", "optim/precision.py", "write_(leaf.state[SCALES[name]], scale)", "pass", EIGHT
    ),
    Mutation("norm of rows here", "optim/sharding.py", "dist.all_reduce(numbers,", "(lambda *_: 0)(numbers,", MESHES),
    Mutation("values cut into heads", "views/fused.py", "= not self.values and", "= False and", SPLIT),
    Mutation("any entries, or half", "contrib/decay.py", "+ known.upper) / 2)", "+ known.upper) / 4)", WORST),
    Mutation(
        "a law through the optima that there are",
        "experiment/sweep/law.py",
        "or len(means) < len(optima)",
        "or len(means) < 2",
        LAW,
    ),
    Mutation(
        "the same order in every epoch",
        "experiment/data/epochs.py",
        "np.array([seed, epoch], dtype",
        "np.array([seed, 0], dtype",
        EPOCHS,
    ),
    Mutation(
        "lanes side by side",
        "experiment/data/epochs.py",
        "(lane * self._stride + first) % self._lanes",
        "lane + 0",
        EPOCHS,
    ),
    Mutation(
        "a loss without its targets' gradient",
        "experiment/models/cross_entropy.py",
        "-others.to(powers.dtype)",
        "0 * others.to(powers.dtype)",
        "tests/unit/training/test_cross_entropy.py",
    ),
    Mutation(
        "a loss that counts the target among the others",
        "experiment/models/cross_entropy.py",
        "logits[wanted] = -math.inf",
        "pass",
        "tests/unit/training/test_cross_entropy.py",
    ),
    Mutation(
        "experts drawn as wide as their number",
        "experiment/training/initial_values.py",
        "parameter.shape[-1]))",
        "parameter.shape[0]))",
        "tests/unit/experiment/test_methods.py",
    ),
    Mutation(
        "queries forget as late as others",
        "recipes/steady.py",
        "QUERIES_DECAY = 0.08, 0.2",
        "QUERIES_DECAY = 0.08, 0.08",
        "tests/unit/discovery/test_fused_values.py",
    ),
    Mutation(
        "fused values forget as soon",
        "discovery/overrides.py",
        '"initial", "stabiliser")',
        '"initial")',
        "tests/unit/discovery/test_fused_values.py",
    ),
    Mutation(
        "powers of e that overflow",
        "experiment/models/cross_entropy.py",
        "if steep:",
        "if False:",
        "tests/unit/training/test_cross_entropy.py",
    ),
    Mutation("a run without its decay", "plan.py", "recipe = recipe.over(run) if run else recipe", "pass", LENGTH),
    Mutation("larger steps' rates fall", "scaling.py", "+ self.by_tokens", "- self.by_tokens", LENGTH),
    Mutation(
        "a checkpoint of another run",
        "optim/param_groups.py",
        'theirs.get("run")) != (now',
        'ours.get("run")) != (now',
        LENGTH,
    ),
    Mutation("a resumed run's rate", "cli/training.py", "config.replace(lr=begun)", "config", LENGTH),
    Mutation(
        "an interval without the run's own scatter", "experiment/sweep/law.py", "@ slopes) + 1", "@ slopes)", LADDER
    ),
    Mutation("a loss with a floor for sure", "experiment/sweep/law.py", "(upper + lower) / 2", "upper", LADDER),
    Mutation("a ladder of one length", "cli/ladder.py", "steps=max(1, round(steps)), lr=AUTO", "lr=AUTO", LADDER),
    Mutation("a target with every seed", "experiment/sweep/ladder.py", "[(target, 1)]", "[(target, 2)]", LADDER),
    Mutation(
        "a wrapped block is one part",
        "discovery/kinds.py",
        'return unwrapped(inner[name]) if name and not plain_name(f"{name}.") else module',
        "return module",
        "tests/unit/discovery/test_streams.py",
    ),
    Mutation(
        "a rate that is no number",
        "optim/param_groups.py",
        "not -ROUNDING <= lr < math.inf",
        "lr < -ROUNDING",
        "tests/unit/optim/test_learning_rates.py",
    ),
    Mutation("the first softmax alone", "discovery/rows.py", "for i in found:", "for i in found[:1]:", PASSES),
    Mutation(
        "the first product alone", "discovery/rows.py", "[[*logits]] if logits", "[[*logits][:1]] if logits", PASSES
    ),
    Mutation(
        "a whole state for a part's",
        "optim/sharding.py",
        "{key: self.placed(p, key, x) for key, x in state.items()}",
        "state",
        "tests/sharded/test_sharing.py",
    ),
    Mutation("what AdamW held still moves", "optim/adamw.py", " | dict.fromkeys(resting, 0.0)", "", TAKEOVER),
    Mutation(
        "factors in bfloat16 are not rounded",
        "experiment/models/fast_linear.py",
        "x, weight = x.to(dtype), weight.to(dtype)",
        "pass",
        "tests/unit/training/test_fast_linear.py",
    ),
    Mutation("biases of few inputs at 0", "discovery/torch_layers.py", "FEW_INPUTS = 16", "FEW_INPUTS = 0", INITIAL),
    Mutation("biases of all inputs drawn", "discovery/torch_layers.py", "FEW_INPUTS = 16", "FEW_INPUTS = 99", INITIAL),
    Mutation(
        "a decay told without its bound",
        "stabilise/decay.py",
        "return replace(self, rate=self.rate * scale / self.lr_scale.value, lr_scale=Constant(scale))",
        "return DecoupledWeightDecay(self.rate * scale / self.lr_scale.value, Constant(scale))",
        "tests/unit/monitor/test_stability.py",
    ),
    Mutation("Adam's average in 8 bits", "optim/precision.py", "torch.float64 and not apart", "torch.float64", EIGHT),
    Mutation("one module is experts", "discovery/routers.py", "len(first) == 1 < len(modules)", "first", EXPERTS),
    Mutation(
        "another optimizer's schedule",
        "optim/param_groups.py",
        "refuse_settings(SETTINGS & group.keys())\n",
        "pass\n",
        STEP,
    ),
    Mutation("a shape of later", "optim/param_groups.py", "refuse_shape(p, *known[p])", "pass", STEP),
    Mutation("a cast to what is not stored", "optim/param_groups.py", "precision.check(p, known[p][0])", "pass", EIGHT),
    Mutation(
        "groups as they were",
        "optim/optimizer.py",
        '{"plan": [self._known[p][1].digest for p in group["params"]], "format": FORMAT}',
        '{"format": FORMAT}',
        "tests/unit/optim/test_learning_rates.py",
    ),
    Mutation(
        "cleared state goes on",
        "optim/optimizer.py",
        " or self.state[p] is not shard.kept",
        "",
        "tests/sharded/test_sharing.py",
    ),
    Mutation("rows of a norm are small", "discovery/tied.py", "small.keys() - _normed(search.model)", "small", ADDED),
    Mutation(
        "a gain of any width", "discovery/tied.py", " and shapes[name] in {shapes[n][-1:] for n in tables}:", ":", ADDED
    ),
    Mutation(
        "a gain before matrices",
        "discovery/tied.py",
        '(kind.name in _BEFORE or kind.name == "gain")',
        'kind.name == "gain"',
        ADDED,
    ),
    Mutation("a norm of the embedding", "discovery/tied.py", "not _NORMS & {*n.", "not set() & {*n.", ADDED),
    Mutation("queries alone", "discovery/multiplied.py", 'in ("query", "key")}', 'in ("query",)}', UNSCALED),
)
