"""Attention logits: `logits` measures and bounds them, `qk_pairs` finds W_q and W_k, `qk_clip` rescales heads."""
