"""docs/other-recipes.md: what the sources remark, parts beyond Muon, older runs and searches."""

from figures import Value, at, column, ends, least, losses, most, of, stored

from prose_figures.transfer import OWN

SEARCHED_TWICE = ("moga_row", "moga_column", "scion", "adamw", "mup_adamw")


def pretrained(part: int, row: str, share: int) -> Value:
    """How far a recipe is above the default at so much of a long run, at 20 or 80 tokens a parameter."""
    return at(f"pretrain/{part}", row, f"above steady at {share}%")


def moga(part: int, share: int) -> list[Value]:
    """The same of MOGA by rows."""
    return [pretrained(part, f"moga_row_{p}", share) for p in ("1.5", "2", "3")]


def late(part: int) -> list[Value]:
    """What MOGA by rows gains in the last quarter."""
    return [before - after for before, after in zip(moga(part, 75), moga(part, 100), strict=True)]


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
        "docs/other-recipes.md",
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
            "where it is: it moves by {} octaves from heads": lambda: [
                at("sources_heads", "...", "drift from 8 to 32")
            ],
            "of heads of 16 at one head of 64 costs {} nats": lambda: [at("sources_heads", "...", "regret of 16's")],
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
            "of `beyond_mup` falls by {} to {} octave, by half": lambda: ends(beyond_horizons()),
            "more by {}. From one block to two it falls by {}, from there by {} octave per doubling": lambda: [
                shape("batch 64") - shape("depth 2, batch 16"),
                shape("depth 1") - shape("depth 2, batch 16"),
                (shape("depth 2, batch 16") - shape("depth 8")) / 2,
            ],
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
            "at half of the run it is {} behind. Then come muP's AdamW ({}), Scion ({}) and AdamW ({}).": lambda: [
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
