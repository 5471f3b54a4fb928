"""A bit flipped on its way, at random: decode believes no block that has one, and every block that has none. When prefill
has taken the checksums, one bit of what decode will read is made another; one load in ten is left whole.

usage: flips_test.py [LOADS [SEED]]
"""
# Promise(vllm): vLLM sees no block before its checksum was right; a failed load is recomputed |
#   decode pulls and compares a CRC per block and layer
import logging
import random
import sys

from baton.hand_off import Run
from engines import BLOCKS, LAYERS, SIZE, Clock, Engine, order


def load(prefill, decode, number, dice, whole):
    """Loads 1 to 3 blocks. Whether decode believes them."""
    count = dice.randint(1, 3)
    theirs, mine = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
    prefill.cache[:] = dice.randbytes(len(prefill.cache))
    transfer = str(number)
    prefill.save(transfer, theirs)
    if not whole:  # what arrives is not what the checksums were taken of
        at = prefill.at(dice.randrange(LAYERS), dice.choice(theirs)).start + dice.randrange(SIZE)
        prefill.cache[at] ^= 1 << dice.randrange(8)
    decode.service.loads.start(order(transfer, [Run(0, mine)], f"127.0.0.1:{prefill.agent.port}", True))
    ended = decode.service.loads.take()
    while not ended.requests:  # a load that never ends is the test's time limit's to find
        decode.service.turn()
        prefill.service.turn()
        ended = decode.service.loads.take()
    prefill.service.sends.drop(transfer)
    if ended.failed:
        return False
    return all(decode.cache[decode.at(layer, a)] == prefill.cache[prefill.at(layer, b)]
               for layer in range(LAYERS) for a, b in zip(mine, theirs)) or "wrong bytes"


def main(loads=300, seed=1):
    dice = random.Random(seed)
    logging.getLogger("baton.hand_off").setLevel(logging.ERROR)  # each flip is a warning
    clock = Clock()
    prefill, decode = Engine("prefill", clock), Engine("decode", clock)
    flipped = whole = 0
    try:
        for number in range(loads):
            clean = number % 10 == 9
            believed = load(prefill, decode, number, dice, clean)
            if believed is not clean:
                sys.exit(f"load {number} of seed {seed}: {'whole' if clean else 'hurt'}, and believed: {believed}")
            flipped, whole = flipped + (not clean), whole + clean
    finally:
        prefill.close(), decode.close()
    print(f"seed {seed}: {flipped} bits flipped, all found; {whole} loads left whole, all believed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
