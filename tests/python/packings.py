"""How kernels pack a block of K and V, as engines tell each other of it, and where each number is then."""
import numpy

TYPES = {"bfloat16": numpy.uint16, "float16": numpy.uint16, "float32": numpy.uint32}


def packing_of(order, tokens, heads, size, dtype="bfloat16", total=None, first=0, tile=16, pair=2):
    """`order`: "rows", [token][head]{K, V}; "vec", [head]{K: [element][token], V: [token][element]}; "amx", K in tiles of
    [tokens]: [group of elements][token]{elements}, V of [elements]: [group of tokens][element]{tokens}."""
    half = tokens * size
    step = 2 * size if order == "rows" else 2 * half
    if order == "amx":
        key = {"tokens": [[tile, pair], [tokens // tile, tile * size]], "elements": [[pair, 1], [size // pair, tile * pair]]}
        value = {"tokens": [[pair, 1], [tokens // pair, tile * pair]], "elements": [[tile, pair], [size // tile, tile * tokens]]}
    elif order == "vec":
        key, value = ({"tokens": [[tokens, 1]], "elements": [[size, tokens]]}, {"tokens": [[tokens, size]], "elements": [[size, 1]]})
    else:
        key = value = {"tokens": [[tokens, 2 * size * heads]], "elements": [[size, 1]]}
    where = {"heads": [[heads, step]]}
    return {"block_tokens": tokens, "heads": heads, "total_heads": total or heads, "first_head": first, "head_size": size,
            "dtype": dtype, "bytes": 2 * half * heads * TYPES[dtype]().itemsize, "key": {"start": 0, **where, **key},
            "value": {"start": size if order == "rows" else half, **where, **value}}


def along(levels, index):
    """Where these steps of an axis are."""
    out = numpy.zeros(len(index), int)
    for count, step in levels:
        out, index = out + index % count * step, index // count
    return out
