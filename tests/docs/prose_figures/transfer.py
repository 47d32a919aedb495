"""docs/transfer.md: the default, its rivals, long runs and models as people wire them."""

from figures import Value, at, column, ends, halves, least, losses, most, of, stored

from prose_figures.measured import stays

OWN, NARROW = "its own best rate...", "width 32's best rate..."
TUNED, LAW = "muon_tuned moonlight_tuned", "above steady_law"
SEARCHED_TWICE = ("moga_row", "moga_column", "scion", "adamw", "mup_adamw")
FAMILIES = ("gpt2", "opt", "llama", "qwen3", "gemma", "mixtral")
OTHERS = ("opt", "bert", "whisper", "llama", "qwen3", "gemma", "mixtral")


def wired(family: str, way: str, width: int) -> Value:
    """A loss of the study of wirings, above the family's first way."""
    return at("wiring", f"{family} | {way}", "width: loss", rf"\b{width}: [^(;]*\(")


def ahead(family: str) -> list[Value]:
    """How far `beyond_mup` is below AdamW at the narrowest and the widest model."""
    first = family == "whisper"
    return [wired(family, "adamw", w) - (Value(0) if first else wired(family, "beyond_mup", w)) for w in (32, 128)]


def above(part: int, recipes: str, head: str = "above steady") -> list[Value]:
    """How far recipes are above the default in a part of the long runs' tables."""
    return [at(f"lengths/{part}", each, head) for each in recipes.split()]


def untied(family: str) -> list[Value]:
    """What a head of its own gains in `beyond_mup`, at the narrowest and the widest model."""
    first = family == "whisper"
    own = [wired(family, "beyond_mup, untied", w) for w in (32, 128)]
    return [
        (Value(0) if first else wired(family, "beyond_mup", w)) - loss for w, loss in zip((32, 128), own, strict=True)
    ]


def pretrained(part: int, row: str, share: int) -> Value:
    """How far a recipe is above the default at so much of a long run, at 20 or 80 tokens a parameter."""
    return at(f"pretrain/{part}", row, f"above steady at {share}%")


def moga(part: int, share: int) -> list[Value]:
    """The same of MOGA by rows."""
    return [pretrained(part, f"moga_row_{p}", share) for p in ("1.5", "2", "3")]


def late(part: int) -> list[Value]:
    """What MOGA by rows gains in the last quarter."""
    return [before - after for before, after in zip(moga(part, 75), moga(part, 100), strict=True)]


def edge(value: Value) -> Value:
    """The lower end of an interval."""
    assert value.half is not None
    return Value(value.value - value.half, None, 2 * value.slack)


def below(of: str, column_: str = "loss after 150 steps") -> Value:
    """How far a recipe's loss at width 256 is above that of `beyond_mup`."""
    return at("losses", of, column_) - at("losses", "beyond_mup", column_)


def rival(name: str) -> list[Value]:
    """How far another family is above the default, at widths 64 and 256."""
    return [at("confirm_rivals", name, f"loss at {width}", r"\(") for width in (64, 256)]


def beyond_horizons() -> list[Value]:
    """By how much the best rate of `beyond_mup` falls from 75 to 400 steps, at each width."""
    early, last = (column("horizons", [f"beyond_mup, {steps} steps"], "best lr") for steps in (75, 400))
    return [a - b for a, b in zip(early, last, strict=True)]


def shape(row: str) -> Value:
    """The best rate of `beyond_mup` at a depth or batch size."""
    return at("shapes", row, "best lr at 64")


def searched(name: str) -> Value:
    """What a family's second search gained on its start, the mean of both widths."""
    start, best = (
        [at("search", f"{name}_2", head, after) for after in ("", ", ")] for head in ("of the start", "loss at")
    )
    return (start[0] + start[1] - best[0] - best[1]) / 2


def one_seed() -> list[Value]:
    """The default with its decay to the end of 80 tokens a parameter; itself, and Moonlight, above it on that seed."""
    ((seed, ours),) = losses("pretrain/gpt_64/80_same_decay", "steady_same_decay").items()
    return [ours, *(losses("pretrain/gpt_64/80_final", each)[seed] - ours for each in ("steady", "moonlight"))]


def both(row: str) -> Value:
    """What a setting gains under Moonlight's scale, the mean of both widths."""
    first, second = column("defaults_moonlight", [row], "gain in nats")
    return (first + second) / 2


FIGURES = [
    *of(
        "docs/transfer.md",
        {
            "the bound beside the decay costs at most {} nats at any width": lambda: [
                most(column("sources_cost", ["bounded_beside_decay..."], "at the best rates"))
            ],
            "In place of the decay the bound costs {} at width 32": lambda: [
                at("sources_cost", "bounded | 32", "at the best rates")
            ],
            "nowhere more than its interval (at 256: {})": lambda: [
                at("sources_cost", "bounded_beside_decay | 256", "at the best rates")
            ],
            "best rate of the hidden matrices moves by {} octaves": lambda: [
                at("sources_moonlight", "...", "drift over 4x")
            ],
            "so the same runs say that those would drift by {} in": lambda: [
                at("sources_moonlight", "...", "drift over 4x") + Value(1)
            ],
            "By it the best rate moves by {} octaves": lambda: [at("sources_graft", "...", "drift over 4x")],
            "falls as heads grow: by {} octaves": lambda: [at("sources_heads", "...", "drift from 8 to 32")],
            "of heads of 16 at one head costs {} nats": lambda: [at("sources_heads", "...", "regret of 16's")],
            "but it costs {} nats against the default": lambda: [
                at("confirm_paired", f"steady, post_clip:2 | {OWN}", "loss")
                - at("confirm_paired", f"steady | {OWN}", "loss")
            ],
            "ahead of tuned Muon by {} nats, and of tuned Moonlight by {}**, in": lambda: above(2, TUNED),
            "ahead of tuned Muon, by {} nats, and of tuned Moonlight, by {}**": lambda: above(3, TUNED, LAW),
            "as published is behind by {}, AdamW by {} and Scion by {}": lambda: above(2, "moonlight adamw scion"),
            "published by {}, of AdamW by {} and of Scion by {}": lambda: above(3, "moonlight adamw scion", LAW),
            "from its 2^{} to the other text's 2^{}": lambda: column("rates", ["hf gpt2", "other text"], "best rate"),
            "transformer ends {} nats": lambda: [at("rates", "digits, vision transformer", "above the lowest")],
            "this one ends {} lower at its best rate, and on 18 seeds that chose neither rate {}": lambda: [
                at("rates", "digits, vision transformer 96...", "above the lowest", after) for after in ("", "seeds")
            ],
            "tuned Muon ends in the mean {} above": lambda: [at("one_rate", "moonlight_tuned...", "minus steady")],
            "searched**, AdamW {}. The vision": lambda: [at("one_rate", "adamw...", "minus steady")],
            "It loses {} nats to the": lambda: [at("lengths_rule", "of its length", "mean of both above the lowest")],
            "at more rate and less decay, it ends {} higher": lambda: above(3, "steady", LAW),
            "ahead of tuned Muon by {} nats and of tuned Moonlight by {}**, in training by {} and {}": lambda: [
                *above(4, TUNED),
                *above(4, TUNED, "above steady, training"),
            ],
            "It is ahead of AdamW by {} and of Scion, with two seeds, by {}": lambda: above(4, "adamw scion"),
            "and ends {} above the default an octave": lambda: above(4, "moonlight"),
            "it moves the sum by {}**, as much": lambda: [at("lengths_screen", "decay falls by a cosine", "sum")],
            "shrinks an entry (Chen et al.) by {}, and": lambda: [at("lengths_screen", "decay where...", "sum")],
            "below them and costs {} to {} nats": lambda: ends(column("lengths_widths", ["..."], "of the law's, 2^-3")),
            "best rates lie within {} octave": lambda: [stays()],
            "could see: {} octave": lambda: [at("confirm_curves", "steady", "drift by the line")],
            "1024 it moves by {} octave (`run": lambda: [at("confirm_sooner", "1024", "drift from 32")],
            "Tuned Muon's falls by {} octaves": lambda: [at("confirm_curves", "moonlight_tuned", "drift by the line")],
            "the default is {} nats below the Muon that was tuned at this very width, and no worse than with "
            "a rate of its own there; that Muon at width 32's rate is {} above": lambda: [
                at("confirm_paired", f"{row} | {NARROW}", "minus tuned Muon") for row in ("steady", "moonlight_tuned")
            ],
            "lost {} nats to the earlier tuned Muon": lambda: [below("muon_moonlight_tuned")],
            "each drifts by {} octave at most over 4x, and width 32's best rate costs at most {} nats": lambda: [
                most(column("confirm_others", ["..."], head)) for head in ("drift over 4x", "regret")
            ],
            "gains {} nats at width 64 over its published settings, keeps its rate, and stays {} to {} above the "
            "default. Scion comes nearest, {} above at width 256; AdamW, with a rate of its own there, and muP's AdamW "
            "are {} above": lambda: [
                at("search", "moga_row", "of the start") - at("search", "moga_row_2", "loss at"),
                *ends(rival("moga_row") + rival("moga_column")),
                rival("scion")[1],
                rival("mup_adamw")[1],
            ],
            "predict for 1600 is {} octave below the best rate found there, and costs {} nats": lambda: [
                at("sizes/0", "steady", head) for head in ("error in octaves", "regret in nats")
            ],
            "rate at 64, to {} octave": lambda: [at("sizes/1", "steady", "error in octaves")],
            "nothing gains more than {} nats": lambda: [
                least(column("beyond_screen", ["steady+..."], "minus its base's"))
            ],
            "lose {} to {}; tables": lambda: ends(
                column(
                    "beyond_screen", [f"{b}+{s}" for b in ("muon", "steady") for s in ("hyperball", "sphere")], "minus"
                )
            ),
            "which is behind by {}, `whitened` gains most, too ({}), then rows normalised after the sign ({}) and "
            "gradients taken ahead ({}),": lambda: [
                at("beyond_screen", "muon", "loss") - at("beyond_screen", "steady", "loss"),
                *(at("beyond_screen", f"muon+{each}", "minus its base's") for each in ("whitened", "rows", "ahead")),
            ],
            "below both by {} and more": lambda: [
                at("beyond_final", "steady", "loss") - at("beyond_final", "steady+soap_short", "loss")
            ],
            "ends at {} at width 256, the default on its eight other seeds at {}:": lambda: [
                stored("beyond/widths_steady+soap_short", "best_loss")[-1],
                at("confirm_paired", f"steady | {OWN}", "loss"),
            ],
            "moves by 0 to {} octave": lambda: [at("widths", "beyond_mup", "drift")],
            "still falls by {} octaves": lambda: [at("widths", "muon_natural", "drift")],
            "apart differ by {} there": lambda: [at("widths", "beyond_mup", "regret")],
            "{} nats below `beyond_mup`, which is {} below that Muon as published and {} below tuned AdamW": lambda: [
                below(each) for each in ("muon_moonlight_tuned", "muon_moonlight", "adamw")
            ],
            "keeps {}, that Muon falls to {} and AdamW to {}.": lambda: column(
                "losses", ["beyond_mup", "muon_moonlight_tuned", "adamw"], "at width 32's rate"
            ),
            "its step takes {} times as long": lambda: [at("losses", "beyond_mup", "step / adamw's")],
            "Half an octave costs about {} nats, a whole octave {} to {}, on": lambda: [
                most(column("tolerance", ["..."], "1.41")),
                *ends(column("tolerance", ["..."], "lr / 2") + column("tolerance", ["..."], "lr x 2")),
            ],
            "of `beyond_mup` falls by {} to {} octave, by half": lambda: ends(beyond_horizons()),
            "more by {}. From one block to two it falls by {}, from there by {} octave per doubling": lambda: [
                shape("batch 64") - shape("depth 2, batch 16"),
                shape("depth 1") - shape("depth 2, batch 16"),
                (shape("depth 2, batch 16") - shape("depth 8")) / 2,
            ],
            "its interval was between {} and {} octaves wide": lambda: ends(halves("widths", "drift", "3 | ...")),
            "At 20 tokens it is {} to {} behind the default at the end": lambda: ends(moga(0, 100)),
            "falls back from {} or {} at a quarter to {} to {} at three quarters": lambda: [
                value for share in (25, 75) for value in ends(moga(1, share))
            ],
            "it gains on the default, {} to {} at 20 tokens and {} to {} at 80, and ends {} to {} behind": lambda: [
                value for of in (late(0), late(1), moga(1, 100)) for value in ends(of)
            ],
            "20 tokens: within {} of each": lambda: [
                pretrained(0, "muon_tuned", 100) - pretrained(0, "moonlight_tuned", 100)
            ],
            "at half of the run it is {} behind. Then come muP's AdamW ({}), Scion ({}) and AdamW ({});": lambda: [
                pretrained(0, "moonlight", 50),
                *(pretrained(0, each, 100) for each in ("mup_adamw", "scion", "adamw")),
            ],
            "{}: it is {} behind at three quarters of the run and gains {} in the last quarter. Tuned Moonlight ({}), "
            "tuned Muon ({}) and Scion ({}) end": lambda: [
                pretrained(1, "moonlight", 100),
                pretrained(1, "moonlight", 75),
                pretrained(1, "moonlight", 75) - pretrained(1, "moonlight", 100),
                *(pretrained(1, each, 100) for each in ("moonlight_tuned", "muon_tuned", "scion")),
            ],
            "ends at {}: {} below itself with the rule and {} below Moonlight as published, on the same seed": one_seed,
            "length of the run ({}; muP's {})": lambda: [pretrained(1, each, 100) for each in ("adamw", "mup_adamw")],
            "every slope within {}, and yet its optimum falls by {} octave over 8x width": lambda: [
                at("coordinates", "beyond_mup | gpt", "of the change"),
                at("widths", "beyond_mup", "drift"),
            ],
            "38 slopes, up to {}; Muon with AdamW's head: 9 of 38, up to {}),": lambda: column(
                "coordinates", ["adamw", "muon"], "of the change"
            ),
            "ahead of AdamW by {} to {} nats (BERT: {} and {}, after 400 steps {} and {}); against `steady_whole`, the "
            "same with one norm for all heads, it gains 0 to {}.": lambda: [
                *ends(wired(each, "adamw", w) for each in FAMILIES for w in (32, 128)),
                *(wired(family, "adamw", w) for family in ("bert", "bert, 400 steps") for w in (32, 128)),
                most(wired(each, "steady_whole", w) for each in FAMILIES[:-1] for w in (32, 128)),
            ],
            "in Gemma by {}, where it moved with every recipe ({}) and a head of its own stops it; the narrow model's "
            "rate costs {} there, {} at most in other families, and {} in BERT after": lambda: [
                *column("wiring", ["gemma | steady", "gemma | beyond_mup"], "drift"),
                at("wiring", "gemma | steady", "regret"),
                most(column("wiring", [f"{each} | steady" for each in FAMILIES if each != "gemma"], "regret")),
                at("wiring", "bert, 400 steps | steady", "regret"),
            ],
            "widths by {} to {} nats but BERT, which is level with it at width 32 and {} ahead at 128; given 400 "
            "steps it is {} and {} ahead": lambda: [
                *ends(gain for each in ("gpt2", "whisper", *FAMILIES) for gain in ahead(each)),
                ahead("bert")[1],
                *ahead("bert, 400 steps"),
            ],
            "ends at {} for Gemma, {} for Mixtral and {} for OPT": lambda: [
                edge(at("wiring", f"{each} | beyond_mup", "drift")) for each in ("gemma", "mixtral", "opt")
            ],
            "known for all: {} in GPT-2, {} at most, where AdamW's own costs {} to {}.": lambda: [
                at("wiring", "gpt2 | beyond_mup", "regret"),
                most(column("wiring", [f"{each} | beyond_mup" for each in OTHERS], "regret")),
                *ends(
                    column("wiring", [f"{f} | adamw" for f in ("opt", "gemma", "mixtral", "bert, 400 steps")], "regret")
                ),
            ],
            "costs {} to {} nats against a head of its own in GPT-2 and OPT and {} in Whisper": lambda: [
                *ends(untied("gpt2") + untied("opt")),
                untied("whisper")[0],
            ],
            "at width 64, Scion by {} nats, MOGA by {} and AdamW by {}.": lambda: [
                at("search", each, "of the start") - at("search", f"{each}_2", "loss at")
                for each in ("scion", "moga_row", "adamw")
            ],
            "and rounding {} nats, less": lambda: [
                at("rounding", "64 | rows, rounded", "loss") - at("rounding", "64 | rows", "loss")
            ],
            "second factor it loses {} nats at width 64 and {} at 128": lambda: column(
                "rounding", ["64 | heads, rounded", "128 | heads, rounded"], "minus the part's first"
            ),
            "plain averaging costs {} nats": lambda: [
                at("defaults_beyond_mup", "momentum (0.9, 0.9)", "gain in nats at 64")
            ],
            "a shorter momentum gains {}, a faster embedding {}.": lambda: [
                both(row) for row in ("momentum (0.8, 0.6)", "embedding 4")
            ],
            "gain at most {} nats (mean": lambda: [most(searched(each) for each in SEARCHED_TWICE)],
            "comes within {} nats of its entropy": lambda: [
                stored("transfer/beyond_mup_markov", "best_loss")[-1] - 2.359
            ],
        },
    )
]
