"""Attention logits: `qk_clip` scales heads back, `qk_pairs` finds W_q and W_k, `logits` measures and bounds."""
