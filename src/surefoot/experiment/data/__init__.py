"""Training text: bytes or BPE tokens of a corpus, or a synthetic Markov language of known entropy."""
