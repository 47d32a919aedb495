"""What a bound costs, how long a step takes, what a GPU and longer runs showed."""

from figures import Value, apart, at, beside, column, ends, halves, least, most, of

TORCH = [f"{name} Muon{kind}" for name in ("torch", "pytorch_optimizer") for kind in ("", ", float32")]
EXACTER = [f"heavyball Muon{kind}" for kind in ("", ", float32")]
OURS = [f"{model} | 1 | surefoot, linear" for model in ("GPT-2 Small, 1 layer", "LLaMA-130M, 1 layer")]
SMALL = "d = 128, 24 layers | {} | surefoot, linear"
STEPS = ("step_without_units", "step_with_units", "small_without_units", "small_with_units")
BOUNDED = ("Post Clip, every step", "Post Clip", "Pre Decay", "Rescale")


def step(mark: str, head: str = "/ torch Muon") -> list[Value]:
    """Our optimizer's cells on matrices of 768, one thread."""
    return column(mark, OURS, head)


def rivals(head: str, *names: str) -> list[Value]:
    """Cells of these optimizers in all tables of a step that have them."""
    return [value for mark in STEPS for name in names for value in column(mark, [name], head)]


def percent(values: list[Value]) -> list[Value]:
    """Ratios as what is added."""
    return [(value - 1) * 100 for value in values]


def added(of: str, *marks: str) -> list[Value]:
    """What Post Clip adds to a step, far from the bound or at it."""
    return [value for mark in marks for value in column(mark, [f"Post Clip, {of}"], "on top of free")]


def longest(of: str) -> list[Value]:
    """The longest step under Post Clip over a mean free one."""
    marks = ("post_clip", "post_clip_small")
    steps = [each for mark in marks for each in column(mark, [f"Post Clip, {of}"], "longest ms")]
    free = [each for mark in marks for each in column(mark, ["free"], "mean ms")]
    return [a / b for a, b in zip(steps, free, strict=True)]


def over_adamw(mark: str, *models: str, head: str = "CPU ms") -> list[Value]:
    """Our step's time over a fused AdamW's, by model."""
    ours = "surefoot" if mark == "gpu_steps" else "surefoot, linear"
    return [at(mark, f"{m} | {ours}", head) / at(mark, f"{m} | torch AdamW, fused", head) for m in models]


def on_a_cpu(units: str) -> list[Value]:
    """Our step over Muon's, of matrices of 768 and of 128, and over AdamW's."""
    muons = step(f"step_{units}_units")
    large = over_adamw(f"step_{units}_units", *(each.removesuffix(" | surefoot, linear") for each in OURS))
    small = at(f"small_{units}_units", SMALL.format(1), "/ torch Muon")
    muons = ends(muons) if units == "with" else [most(muons)]
    return [*muons, small, *ends(large), *over_adamw(f"small_{units}_units", "d = 128, 24 layers | 1")]


def over_muon(model: str, kind: str = "") -> Value:
    """A step on a GPU over torch's Muon."""
    return at("gpu_steps", f"{model} | surefoot{kind}", "/ torch Muon")


def on_a_gpu() -> list[Value]:
    """Steps on a GPU over torch's Muon: GPT-2 Small, LLaMA, that compiled, small matrices, those as a graph."""
    small = over_muon(NARROW), over_muon(NARROW, ", CUDA graph")
    return [over_muon(GPT), over_muon(LLAMA), over_muon(LLAMA, ", compiled"), *small]


def stays() -> Value:
    """How far the default's best rates over the widths of long runs are apart."""
    return apart(column("lengths_widths", ("32", "64", "128", "256"), "best lr"))


def later_drift() -> Value:
    """By how many octaves the default's best rate falls from width 64 to 256 after 1,600 steps."""
    return at("confirm_long", "64", "best lr") - at("confirm_long", "256", "best lr")


FIVE, GRAM = "polar_express_fp16", "gram-newton-schulz, {}"
GPT, LLAMA, NARROW = "GPT-2 Small, 12 layers", "LLaMA 1.1B, 22 layers", "d = 128, 24 layers"
WIDE = "gpt, width 768, depth 2 | {}"

IN_SHORT = {
    "CPU without bfloat16 units, GPT-2 Small or LLaMA-130M | {} ({}) | {} to {} ({}) |": lambda: on_a_cpu("without"),
    "CPU with bfloat16 units, the same | {} to {} ({}) | {} to {} ({}) |": lambda: on_a_cpu("with"),
    "H200, GPT-2 Small | {} ({}) | {} ({}) |": lambda: [
        *(over_muon(model) for model in (GPT, NARROW)),
        *over_adamw("gpu_steps", GPT, NARROW, head="median ms"),
    ],
    "H200, LLaMA of a billion parameters | {} | {} |": lambda: [
        over_muon(LLAMA),
        *over_adamw("gpu_steps", LLAMA, head="median ms"),
    ],
    "8192 tokens and {} % with half a million (AdamW: {} % with": lambda: [
        at("share", WIDE.format("surefoot, beyond_mup"), "share at 2^19"),
        at("share", WIDE.format("torch AdamW, fused"), "share of the step"),
    ],
    "number of layers: {} MiB for GPT-2 Small (Muon: {})": lambda: [
        at("memory", f"GPT-2 Small, 3 layers | {each}", "peak of the step MiB")
        for each in ("surefoot, linear", "torch Muon")
    ],
    "256 MiB: {} MiB (Muon: {}), at a billion parameters {} (Muon: {})": lambda: [
        at("gpu_steps", f"{model} | {each}", "peak MiB")
        for model in (GPT, LLAMA)
        for each in ("surefoot", "torch Muon")
    ],
    "{} of Muon's time in place of {} (a billion parameters)": lambda: [
        over_muon(LLAMA, ", compiled"),
        over_muon(LLAMA),
    ],
    "{} of Muon's time in place of {} (width 128)": lambda: [over_muon(NARROW, ", CUDA graph"), over_muon(NARROW)],
    "state is {} MB in place of {}, at": lambda: column("momentum", ("int8", "float32"), "state, MB"),
    "{} to {} % more time on a CPU, {} to {} times the mean time on the H200": lambda: [
        *ends(value for of in ("far", "at") for value in added(of, "post_clip", "post_clip_small")),
        *ends(beside("gpu_steps", "surefoot, Post Clip", "surefoot", "mean ms")),
    ],
    "with bfloat16 units: {} to {} times the tokens a second": lambda: ends(
        beside("loop", "surefoot train, steady, --autocast bfloat16", "surefoot train, steady", "tokens a second")
    ),
}
"""The summary of docs/performance.md."""

FIGURES = [
    *of(
        "docs/stability.md",
        {
            "exceeds the radius by {} of it after a third to a half of a run at 2^-3.5, by {} at 2^-2.5, and by {} "
            "and {} at the end": lambda: [
                at("sources_wion", f"1 | 2^-{rate}", head)
                for head in ("largest norm / radius - 1", "after 150")
                for rate in ("3.5", "2.5")
            ],
            "Four vectors end at {} and {}": lambda: [
                at("sources_wion", f"4 | 2^-{rate}", "after 150") for rate in ("3.5", "2.5")
            ],
            "loss**: {} over five seeds. Weight decay with the same promise costs {}: it keeps norms at {}": lambda: [
                *column("stabilisers", ["all roles: Post Clip", "all roles: weight decay"], "against free"),
                at("stabilisers", "all roles: weight decay", "peak norm"),
            ],
            "alone are {} to {}, all roles {} to {} (": lambda: [
                value
                for rows in (BOUNDED, [f"all roles: {each}" for each in BOUNDED[:3]])
                for value in ends(column("stabilisers", rows, "against free"))
            ],
            "Pre Decay's {} alone": lambda: [at("stabilisers", "Pre Decay", "against free")],
            "the added time is {} to {} % against {} to {} %": lambda: percent(
                column(
                    "stabilisers",
                    [f"{roles}Post Clip{period}" for period in ("", ", every step") for roles in ("", "all roles: ")],
                    "time of a step",
                )
            ),
            "Spheres cost {}**": lambda: [at("stabilisers", "Normalise", "against free")],
            "takes {} times its time": lambda: beside("stabilisers", "Spectral Sphere", "Normalise", "time of a step"),
            "not better than Post Clip ({} and {} on": lambda: column(
                "stabilisers", ["Pre Decay", "Post Clip"], "against free"
            ),
            "do not (up to {}): the": lambda: [at("coordinates", "beyond_mup | llama", "of the change")],
            "each, up to {}; `tied`": lambda: [
                most(column("coordinates", [f"steady | {m}" for m in ("llama", "qwen", "moe")], "of the change"))
            ],
        },
    ),
    *of(
        "docs/transfer.md",
        {
            "best rates at 256 and 1024 are {} octave apart ({} higher at 512)": lambda: [
                at("gpu", "steady", "drift in octaves"),
                at("gpu", "steady", "best lr at 512") - at("gpu", "steady", "best lr at 256"),
            ],
            "ends {} below tuned Muon on other files, {} above it on": lambda: [
                at("gpu", "moonlight_tuned", f"{split} loss") - at("gpu", "steady", f"{split} loss")
                for split in ("validation", "training")
            ],
            "from 64 to 256 the best rate falls by {} octave;": lambda: [later_drift()],
            "best rate of width 32 costs {} nats; that of": lambda: [at("confirm_long", "256", "regret")],
            "does not know the width, {} (half": lambda: [at("confirm_long", "256", "law")],
        },
    ),
    *of(
        "docs/performance.md",
        {
            **IN_SHORT,
            "on an accelerator, has an alignment of {} and": lambda: [least(column("gpu_signs", [FIVE], "alignment"))],
            "above 1. It takes {} to {} of the time of Muon's `newton_schulz`": lambda: ends(
                beside("gpu_signs", FIVE, "newton_schulz, bfloat16", "median ms")
            ),
            "Compiled, it takes {} to {} of the time of Gram Newton-Schulz with its kernels for Hopper, and {} to {} "
            "of its time by torch alone. Gram Newton-Schulz has an alignment of {} to {} and a largest singular value "
            "of {}.": lambda: [
                *ends(column("gpu_signs", [f"{FIVE}, compiled"], "/ gram")),
                *ends(beside("gpu_signs", f"{FIVE}, compiled", GRAM.format("torch"), "median ms")),
                *ends(column("gpu_signs", [GRAM.format("kernels")], "alignment")),
                most(column("gpu_signs", [GRAM.format("kernels")], "largest")),
            ],
            "by {} to {} % with an alignment of {} to {}, heavyball's coefficients by {} to {} % with {};": lambda: [
                *ends(percent(rivals("largest s.v.", *TORCH))),
                *ends(rivals("alignment", *TORCH)),
                *ends(percent(rivals("largest s.v.", *EXACTER))),
                least(rivals("alignment", *EXACTER)),
            ],
            "Surefoot takes {} of the best float32 rival's time at width 768 without bfloat16 units and {} with them; "
            "at 128, {} and {}.": lambda: [
                most(step("step_without_units", "/ best float32")),
                most(step("step_with_units", "/ best float32")),
                *(at(f"small_{w}_units", SMALL.format(1), "/ best float32") for w in ("without", "with")),
            ],
            "without units to {} of torch's Muon at 768, {} at 128 and there {} of the best float32 rival": lambda: [
                at("step_without_units", OURS[0].replace("| 1 |", "| 2 |"), "/ torch Muon"),
                at("small_without_units", SMALL.format(2), "/ torch Muon"),
                at("small_without_units", SMALL.format(2), "/ best float32"),
            ],
            "batches, with an alignment of {}, then": lambda: [
                most(column("small_with_units", ["2 | pytorch_optimizer Muon"], "alignment"))
            ],
            "{} to {} of Newton-Schulz's time, `qdwh`, which is exact to 3e-5, {} to {}, and `halley` {} on": lambda: [
                *(value for row in ("qdwh_2", "qdwh") for value in ends(column("msign", [row], "/ newton_schulz"))),
                most(column("msign", ["24 x 128 x 512 | halley"], "/ newton_schulz")),
            ],
            "eight seeds can see, {} to {} nats": lambda: ends(halves("directions", "against qdwh")),
            "is {} to {} with one iteration (the worst matrix: {}) and {} with two; the default has {} to {}": lambda: [
                *ends(column("streaming", ["streaming"], "alignment")),
                at("streaming", "64 | streaming", "alignment, attention", "\\("),
                least(column("streaming", ["streaming, 2 iterations"], "alignment")),
                *ends(column("streaming", ["auto"], "alignment")),
            ],
            "s norm reaches {},": lambda: [at("streaming", "64 | as published", "largest singular value")],
            "it is slower**: {} to {} times the time of `qdwh_2` and {} to {} times that of `halley`, the methods that "
            "`auto` takes, and {} to {} times that of": lambda: [
                value
                for row in ("qdwh_2", "halley", "qdwh")
                for value in ends(beside("msign_streaming", "streaming", row, "CPU ms"))
            ],
            "(decision 7): {} to {} times the time of a fused": lambda: ends(
                column("elementwise", ["row step (RowRMS)", "sign step (MaxAbs)"], "/ AdamW, fused")
            ),
            "Column steps take {} to {} times its": lambda: ends(
                column("elementwise", ["column step..."], "/ AdamW, fused")
            ),
            "The norm is {} to {} % of such a pair forward and {} to {} % with": lambda: [
                end(column("layers", [f"2048 | {which} | nn.Linear alone"], "/ norm and linear")) * -100 + 100
                for which in ("forward", "forward and backward")
                for end in (most, least)
            ],
            "It adds {} to {} % where no matrix is near the bound ({} to {} % on matrices of 128), and {} to {} % "
            "where all are ({} to {} %).": lambda: [
                value
                for of in ("far", "at")
                for mark in ("post_clip", "post_clip_small")
                for value in ends(added(of, mark))
            ],
            "One step in 16 takes longer: {} to {} times a free one where no matrix is near, {} to {} times": lambda: [
                value for of in ("far", "at") for value in ends(longest(of))
            ],
            "Pre Decay take {} to {} times the free step": lambda: [
                end(column("bounds", ["Post Clip, at, period 1", "Pre Decay, at"], "on top of free")) / 100 + 1
                for end in (least, most)
            ],
            "`PostClip` is {} to {} % ([stability])": lambda: percent(
                column("stabilisers", ["Post Clip", "all roles: Post Clip"], "time of a step")
            ),
        },
    ),
]
