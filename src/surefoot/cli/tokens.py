"""`surefoot tokens`: text into files of tokens, once, for every training that follows."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from surefoot.cli import options

_EXAMPLES = """
surefoot tokens corpus.jsonl data/corpus --vocab 32768
surefoot tokens ~/notes data/notes --vocab 4096 --validation-one-in 20
surefoot tokens hf:HuggingFaceFW/fineweb-edu:sample-10BT data/edu --tokenizer gpt2.json --limit 100000
surefoot tokens --verify data/corpus
surefoot train --data bin:data/corpus --out runs/corpus
"""


def add_to(commands: options.Commands) -> None:
    """Add the command."""
    help = "encode text as files of tokens (nanoGPT's and modded-nanogpt's format), with a manifest"
    parser = options.command(commands, "tokens", run, help, _EXAMPLES)
    add = parser.add_argument
    help = "text file or folder, .jsonl, .parquet, or hf:NAME or hf:NAME:CONFIG, a data set of the Hugging Face hub"
    add("source", metavar="IN", nargs="?", help=help)
    add("out", metavar="OUT", type=options.path, help="folder to write, resumed if it was interrupted")
    add("--vocab", type=options.count, help="train a byte-level BPE vocabulary of N tokens")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, in place of training one")
    help = "header: 256 int32 (magic, version, count) before the tokens; raw: uint16 tokens alone, as nanoGPT has them"
    add("--layout", choices=["header", "raw"], default="header", help=help)
    add("--field", default="text", help="the text's field in lines, rows and data sets")
    add("--shard-tokens", type=options.count, default=100_000_000, help="tokens per file")
    help = "one document in N is for validation, chosen by its text"
    add("--validation-one-in", type=options.count, default=100, metavar="N", help=help)
    add("--limit", type=options.count, metavar="N", help="stop after N documents")
    add("--verify", action="store_true", help="only compare the files of OUT with their digests")
    options.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, or verify it."""
    from surefoot.experiment.data.convert import Conversion, absolute, convert, verify

    if arguments.verify == (arguments.source is not None):
        raise ValueError("give IN and OUT to write tokens, or --verify OUT to compare what was written")
    if arguments.verify:
        manifest = verify(arguments.out)
    else:
        conversion = absolute(Conversion(**{each.name: getattr(arguments, each.name) for each in fields(Conversion)}))
        arguments.resume = f"the same command goes on with what is in {arguments.out}"
        with _progress(arguments.limit) as progress:
            manifest = convert(conversion, arguments.out, progress)
    shards, written = manifest["shards"], ", all as they were written" * arguments.verify
    held = sum(shard["tokens"] for shard in shards if shard["name"].startswith("val"))
    sentence = (
        f"{arguments.out}: {manifest['tokens']:,} tokens of {manifest['vocab']:,}, {held:,} of them for validation, "
        f"in {len(shards)} files{written}; {manifest['documents']:,} documents"
    )
    if held in (0, manifest["tokens"]):
        side, one_in = "training" if held else "validation", f"one document in {arguments.validation_one_in} is for"
        print(f"surefoot: no tokens for {side}: {one_in} validation; runs split those that there are", file=sys.stderr)
    print(json.dumps(manifest, allow_nan=False) if arguments.json else sentence, file=arguments.stdout)
    return 0


@contextmanager
def _progress(limit: int | None) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    with tqdm(total=limit, unit=" documents", file=sys.stderr, mininterval=0.2, leave=False, disable=None) as bar:

        def move(documents: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(documents - bar.n)

        yield move
