"""docs/transfer.md: the default, its rivals, long runs and models as people wire them."""

from figures import Value, apart, at, column, ends, halves, most, of

from prose_figures.measured import stays

OWN, NARROW = "its own best rate...", "width 32's best rate..."
TUNED, LAW = "muon_tuned moonlight_tuned", "above steady_law"
FAMILIES = ("gpt2", "opt", "whisper", "llama", "qwen3", "gemma", "mixtral")
EQUAL = (
    *("gpt", "gpt tied", "gpt learned positions", "gpt biases", "gpt its own initial values", "llama", "experts"),
    *("bpe 2k", "context 128, batch 8", "hf gpt2", "hf gpt2 its own initial values", "hf gpt2 untied", "hf llama 32"),
    *("hf gemma", "other text", "bpe 1k", "bpe 8k", "context 256, batch 4", "width 96, depth 6", "llama 96, grouped"),
    *("experts 96, other text", "gpt tied, bpe 1k", "hf llama", "hf qwen3", "context 256, batch 4, other text"),
    *("hf gpt2 96, bpe 1k", "hf llama 96, other text", "gpt tied, other text", "hf gpt2 96, other text"),
    *("llama 96 tied, bpe 2k", "gpt 128, heads of 64", "llama 128, heads of 128, other text"),
    *("gpt tied, logits times 1/d", "llama 96 tied, logits times 1/d, other text"),
)
"""The searches of causal models at 150 steps of 1,024 tokens."""
VISION = ("second ends {} lower at its best rate", "neither rate it is {}", "its pictures ({} on other seeds")
PICTURES = "digits, vision transformer 96, mean"
SHIFTED = ("vision transformer 48, depth 4", "vision transformer 128, mean", "residual 48")
OTHERS = ("opt", "bert", "whisper", "llama", "qwen3", "gemma", "mixtral")


def wired(family: str, way: str, width: int) -> Value:
    """A loss of the study of wirings, above the family's first way."""
    return at("wiring", f"{family} | {way}", "width: loss", rf"\b{width}: [^(;]*\(")


def ahead(family: str) -> list[Value]:
    """How far `beyond_mup` is below AdamW at the narrowest and the widest model."""
    return [wired(family, "adamw", w) - wired(family, "beyond_mup", w) for w in (32, 128)]


def above(part: int, recipes: str, head: str = "above steady") -> list[Value]:
    """How far recipes are above the default in a part of the long runs' tables."""
    return [at(f"lengths/{part}", each, head) for each in recipes.split()]


def untied(family: str) -> list[Value]:
    """What a head of its own gains in `beyond_mup`, at the narrowest and the widest model."""
    return [wired(family, "beyond_mup", w) - wired(family, "beyond_mup, untied", w) for w in (32, 128)]


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


FIGURES = [
    *of(
        "docs/transfer.md",
        {
            "But it costs {} nats against the default": lambda: [
                at("confirm_paired", f"steady, post_clip:2 | {OWN}", "loss")
                - at("confirm_paired", f"steady | {OWN}", "loss")
            ],
            "ahead of tuned Muon by {} nats, and of tuned Moonlight by {}**, in": lambda: above(2, TUNED),
            "ahead of tuned Muon, by {} nats, and of tuned Moonlight, by {}**": lambda: above(3, TUNED, LAW),
            "as published is behind by {}, AdamW by {} and Scion by {}": lambda: above(2, "moonlight adamw scion"),
            "published by {}, of AdamW by {} and of Scion by {} (three": lambda: above(3, "moonlight adamw scion", LAW),
            "lie within {} octave, from the 2^{} of grouped LLaMA to the other text's 2^{}": lambda: [
                apart(column("rates", EQUAL, "best rate")),
                *column("rates", ["llama 96, grouped", "other text"], "best rate"),
            ],
            "80 steps GPT-2's wiring loses {} nats": lambda: [at("rates", "hf gpt2 128, 80 steps", "above the lowest")],
            "GPT-2's wiring ends {} nats below itself as it was, and {} below the same with": lambda: [
                at("small_rows", "hf gpt2", "loss at the given rate"),
                at("rates", "hf gpt2 untied", "loss at") - at("rates", "hf gpt2", "loss at"),
            ],
            "transformer ends {} nats": lambda: [at("rates", "digits, vision transformer", "above the lowest")],
            **{
                words: lambda after=after: [at("rates", "digits, vision transformer 96...", "above the lowest", after)]
                for words, after in zip(VISION, ("", "seeds", "seeds"), strict=True)
            },
            "seeds; {} where these are shifted": lambda: [at("rates", f"shifted {PICTURES}", "above the lowest")],
            "its best rate is {} octaves higher, and the given one is {} above the": lambda: [
                at("rates", f"shifted {PICTURES}", "best rate") - at("rates", f"{PICTURES}...", "best rate"),
                at("rates", f"shifted {PICTURES}", "above the lowest"),
            ],
            "settings of that kind lose {} at most": lambda: [
                most(column("rates", [f"shifted digits, {each}" for each in SHIFTED], "above the lowest"))
            ],
            "its best rate moves by {} octave over 32x the width": lambda: [
                at("confirm_sooner", "1024", "drift from 32")
            ],
            "costs {} nats in the mean of twenty-three held-out settings, and {} in the worst": lambda: [
                at("one_rate", "steady | of the length", head) for head in ("mean above", "largest")
            ],
            "apart it is the best one in {}": lambda: [at("families", "the given rate", "families")],
            "and half or twice it in {}": lambda: [
                at("families", "half of it", "families") + at("families", "twice it", "families")
            ],
            "with the rate of width 32, it is {} nats below a Muon": lambda: [
                at("confirm_paired", f"steady | {NARROW}", "minus tuned Muon")
            ],
            "tuned Muon ends in the mean {} above": lambda: [at("one_rate", "moonlight_tuned...", "minus steady")],
            "searched**, AdamW {} (without the four newest": lambda: [at("one_rate", "adamw...", "minus steady")],
            "The law loses {} nats to the": lambda: [
                at("lengths_rule", "of its length", "mean of both above the lowest")
            ],
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
            "best rate of tuned Muon falls by {} octaves": lambda: [
                at("confirm_curves", "moonlight_tuned", "drift by the line")
            ],
            "the default is {} nats below the Muon that was tuned at this very width, and no worse than with "
            "a rate of its own there. With width 32's rate that Muon loses {}.": lambda: [
                at("confirm_paired", f"{row} | {NARROW}", "minus tuned Muon") for row in ("steady", "moonlight_tuned")
            ],
            "each drifts by {} octave at most over 4x, and width 32's best rate costs at most {} nats": lambda: [
                most(each for x in column("confirm_others", ["..."], "drift") for each in (x, Value(0) - x)),
                most(column("confirm_others", ["..."], "regret")),
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
            "{} nats below `beyond_mup`, which is {} below that Muon as published and {} below tuned AdamW": lambda: [
                below(each) for each in ("muon_moonlight_tuned", "muon_moonlight", "adamw")
            ],
            "keeps {}, that Muon rises to {} and AdamW to {}.": lambda: column(
                "losses", ["beyond_mup", "muon_moonlight_tuned", "adamw"], "at width 32's rate"
            ),
            "its step takes {} times as long": lambda: [at("losses", "beyond_mup", "step / adamw's")],
            "Half an octave costs about {} nats, a whole octave {} to {}, on": lambda: [
                most(column("tolerance", ["..."], "1.41")),
                *ends(column("tolerance", ["..."], "lr / 2") + column("tolerance", ["..."], "lr x 2")),
            ],
            "its interval was between {} and {} octaves wide": lambda: ends(halves("widths", "drift", "3 | ...")),
            "every slope within {}, and yet its optimum falls by {} octave over 8x width": lambda: [
                at("coordinates", "beyond_mup | gpt", "of the change"),
                at("widths", "beyond_mup", "drift"),
            ],
            "38 slopes, up to {}; Muon with AdamW's head: 9 of 38, up to {}),": lambda: column(
                "coordinates", ["adamw", "muon"], "of the change"
            ),
            "ahead of AdamW by {} to {} nats (BERT: {} and {}, after 400 steps {} and {}). Against `steady_whole`, the "
            "same with one norm for all heads, it gains 0 to {}.": lambda: [
                *ends(wired(each, "adamw", w) for each in FAMILIES for w in (32, 128)),
                *(wired(family, "adamw", w) for family in ("bert", "bert, 400 steps") for w in (32, 128)),
                most(wired(each, "steady_whole", w) for each in FAMILIES for w in (32, 128)),
            ],
            "in Gemma by {}, where it moved with every recipe ({}) and a head of its own stops it, and in GPT-2, OPT "
            "and Whisper by {}, {} and {}. * The narrow model's rate costs {} nats in GPT-2, {} in OPT, {} in Gemma, "
            "{} at most in other families, and {} in BERT after": lambda: [
                *column("wiring", ["gemma | steady", "gemma | beyond_mup"], "drift"),
                *column("wiring", [f"{each} | steady" for each in ("gpt2", "opt", "whisper")], "drift"),
                *column("wiring", [f"{each} | steady" for each in ("gpt2", "opt", "gemma")], "regret"),
                most(column("wiring", [f"{each} | steady" for each in ("bert", "whisper", *FAMILIES[3:5])], "regret")),
                at("wiring", "bert, 400 steps | steady", "regret"),
            ],
            "widths by {} to {} nats but in BERT, where it is level at width 32 and {} ahead at 128; given 400 "
            "steps it is {} and {} ahead": lambda: [
                *ends(gain for each in FAMILIES for gain in ahead(each)),
                ahead("bert")[1],
                *ahead("bert, 400 steps"),
            ],
            "ends at {} for Gemma, {} for Mixtral and {} for OPT": lambda: [
                edge(at("wiring", f"{each} | beyond_mup", "drift")) for each in ("gemma", "mixtral", "opt")
            ],
            "rate costs {} in GPT-2 and {} at most in the others, where AdamW's own costs {} to {}.": lambda: [
                at("wiring", "gpt2 | beyond_mup", "regret"),
                most(column("wiring", [f"{each} | beyond_mup" for each in OTHERS], "regret")),
                *ends(
                    column("wiring", [f"{f} | adamw" for f in ("opt", "gemma", "mixtral", "bert, 400 steps")], "regret")
                ),
            ],
            "cost {} to {} nats against a head of its own in GPT-2 and OPT and {} in Whisper": lambda: [
                *ends(untied("gpt2") + untied("opt")),
                untied("whisper")[0],
            ],
        },
    )
]
