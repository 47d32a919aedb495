"""README, the explanations and the promises: what they say of transfer, bounds and speed."""

from figures import at, column, ends, least, most, of

from prose_figures.measured import GPT, LLAMA, added, later_drift, on_a_cpu, on_a_gpu, over_adamw, stays, step
from prose_figures.measured import NARROW as SMALLEST
from prose_figures.other_recipes import pretrained
from prose_figures.transfer import NARROW, OWN

FIGURES = [
    *of(
        "README.md",
        {
            "Muon's by {}, and": lambda: [at("demo", "moonlight_tuned", "drift in octaves") / 2],
            "tuned at width 32 costs them {} and {} nats at width 128": lambda: column(
                "demo", ["adamw", "moonlight_tuned"], "regret at 128"
            ),
            "the default's best rate moves by {} octave": lambda: [at("confirm_curves", "steady", "drift by the line")],
            "Muon tuned at width 256 | {} | | the same | that Muon at the rate tuned at width 32 | {} |": lambda: [
                at("confirm_paired", f"steady | {NARROW}", "minus tuned Muon"),
                at("confirm_paired", f"moonlight_tuned | {NARROW}", "loss")
                - at("confirm_paired", f"steady | {NARROW}", "loss"),
            ],
            "twelve seeds | tuned Moonlight, the next best | {} |": lambda: [
                at("lengths/2", "moonlight_tuned", "above steady")
            ],
            "seven seeds | tuned Muon, the next best | {} |": lambda: [
                at("lengths/3", "muon_tuned", "above steady_law")
            ],
            "its rate searched in each | {} in the mean, {} to {} |": lambda: [
                at("one_rate", "moonlight_tuned...", "minus steady", after) for after in ("", r"\(", "to ")
            ],
            "three seeds | Moonlight as published | {} |": lambda: [at("lengths/3", "moonlight", "above steady_law")],
            "Moonlight as published | {}: it is higher |": lambda: [pretrained(1, "moonlight", 100)],
            "| 7,700 steps: {} nats above the best": lambda: [
                at("lengths_rule", "of its length", "mean of both above the lowest")
            ],
            "the default reaches its loss in {} of its steps": lambda: [
                at("beyond_final", "steady", "steps to its loss")
            ],
            "`steady_soap`, takes {} of them": lambda: [at("beyond_final", "steady+soap_short", "steps to its loss")],
            "stays | {} octave | width 1024: {} over 32x, beyond 256 one seed. 1,600 steps on bytes: falls by {} from "
            "64 to 256, where the rate of the length costs {} nats; on tokens of documents read once: "
            "within {} octave from 32 to 256": lambda: [
                at("confirm_curves", "steady", "drift by the line"),
                at("confirm_sooner", "1024", "drift from 32"),
                later_drift(),
                at("confirm_long", "256", "law"),
                stays(),
            ],
            "stays | exponent {} |": lambda: [at("sizes/2", "steady | 64", "power")],
            "rises | exponent {}; predicted at 4x the largest: {} octave": lambda: [
                at("sizes/1", "steady", "power"),
                at("sizes/1", "steady", "error in octaves"),
            ],
            "falls | exponent {}; predicted at 4x the longest: {} octave": lambda: [
                at("sizes/0", "steady", "power"),
                at("sizes/0", "steady", "error in octaves"),
            ],
            "{} without bfloat16 units ({} of the best rival's time in float32), {} to {} where "
            "bfloat16 is four times as fast as float32.": lambda: [
                most(step("step_without_units")),
                most(step("step_without_units", "/ best float32")),
                *ends(step("step_with_units")),
            ],
            "On an H200: {} on GPT-2 Small, {} (compiled {}) on a LLaMA": lambda: on_a_gpu()[:3],
            "AdamW's step it is {} to {} times as long on a CPU, {} to {} on the H200": lambda: [
                *ends(on_a_cpu("without")[2:] + on_a_cpu("with")[3:]),
                *ends(over_adamw("gpu_steps", GPT, SMALLEST, LLAMA, head="median ms")),
            ],
            "in small models. State: {} bytes per": lambda: [most(step("step_with_units", "state B/param"))],
        },
    ),
    *of(
        "docs/layers.md",
        {
            "a small GPT ends at {} so, {} otherwise": lambda: [
                at("rates", each, "loss at") for each in ("gpt tied, logits times 1/d", "gpt tied")
            ],
            "A small GPT ends {} nats lower for it after 150 steps, GPT-2's wiring {}": lambda: column(
                "small_rows", ["gpt tied", "hf gpt2"], "loss at the given rate"
            ),
        },
    ),
    *of(
        "docs/how-to/no-sweep.md",
        {
            "better there, by {} nats in 80 steps": lambda: [at("rates", "hf gpt2 128, 80 steps", "above the lowest")],
            "reference GPT and {} nats with GPT-2's wiring": lambda: [
                at("rates", "hf gpt2 its own initial values", "loss at") - at("rates", "hf gpt2", "loss at")
            ],
        },
    ),
    *of(
        "docs/how-to/which.md",
        {"the given rate costs {} nats at most, but": lambda: [at("rates", "hf gpt2 96, bpe 1k", "above the lowest")]},
    ),
    *of(
        "docs/explanation/bounds.md",
        {
            "the added time is {} to {} % of the optimizer's step, {} to {} % while": lambda: [
                value for of in ("far", "at") for value in ends(added(of, "post_clip", "post_clip_small", "bounds"))
            ],
            "cost {} nats, Post Clip on the same matrices {}.": lambda: column(
                "stabilisers", ["Normalise", "Post Clip"], "against free"
            ),
        },
    ),
    *of(
        "docs/explanation/evidence.md",
        {
            "| the default | {} octave | {} nats better": lambda: [
                at("confirm_curves", "steady", "drift by the line"),
                at("confirm_paired", f"steady | {NARROW}", "minus tuned Muon"),
            ],
            "(`moonlight_tuned`) | {} octaves | {} nats worse": lambda: [
                at("confirm_curves", "moonlight_tuned", "drift by the line"),
                at("confirm_paired", f"moonlight_tuned | {NARROW}", "minus tuned Muon"),
            ],
            "costs the default {} nats at width 256": lambda: [
                at("confirm_paired", f"steady, post_clip:2 | {OWN}", "loss")
                - at("confirm_paired", f"steady | {OWN}", "loss")
            ],
            "cost that recipe {} (": lambda: [at("stabilisers", "all roles: weight decay", "against free")],
            "takes {} to {} of the time": lambda: [least(step("step_without_units")), most(step("step_with_units"))],
            "the embedding: {} octave in [Gemma]": lambda: [at("wiring", "gemma | steady", "drift in octaves")],
            "and its logits divided, it moves by {}.": lambda: [at("confirm_others", "tied", "drift over 4x")],
        },
    ),
    *of(
        "docs/promises.md",
        {
            "on every role costs it {} nats at width 256": lambda: [
                at("confirm_paired", f"steady, post_clip:2 | {OWN}", "loss")
                - at("confirm_paired", f"steady | {OWN}", "loss")
            ],
            "none ({}, where weight decay with the same promise cost {};": lambda: column(
                "stabilisers", ["all roles: Post Clip", "all roles: weight decay"], "against free"
            ),
        },
    ),
]
