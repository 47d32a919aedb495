"""Matrix functions on singular values: the sign (msign) and the clip (mclip)."""
