"""How a parameter is made of matrices `(out, in)` or vectors: plain indexing, none of the library's views."""


def whole(w):
    return [w]


def turned(w):
    return [w.T]


def flat(w):
    """A kernel's patch matrix."""
    return [w.flatten(1)]


def entries(w):
    return [w.flatten()]


def rows(*sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return lambda w: [w[a : a + n] for a, n in zip(starts, sizes, strict=True)]


def columns(*sizes):
    return lambda w: [x.T for x in rows(*sizes)(w.T)]


def headwise(heads, *sizes):
    """Rows (head, part, size): a matrix for each part."""
    of = [part for _ in range(heads) for part, size in enumerate(sizes) for _ in range(size)]
    return lambda w: [w[[i for i, p in enumerate(of) if p == part]] for part in range(len(sizes))]


def per_expert(split=whole):
    return lambda w: [part for expert in w for part in split(expert)]


def alternate(w):
    return [w[0::2], w[1::2]]


def alternate_columns(w):
    return [w[:, 0::2].T, w[:, 1::2].T]
