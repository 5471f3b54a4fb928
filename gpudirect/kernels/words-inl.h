// Words between a running kernel and the host.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

template <class Block>
BATON_DEVICE void write_ticket(Block& block, const WriteTicket& a) {
  block.each([&](uint32_t thread) {
    if (thread != 0 || block.index() != 0) return;
    const uint64_t count = block.load(a.count) + a.add;
    if (a.add != 0) block.store(a.count, count);
    block.store_release(a.ticket, count);
  });
}

// Whether the word has come so far before `end`, on the block's clock.
template <class Block>
BATON_DEVICE bool wait_until(Block& block, const uint64_t* word, uint64_t at_least, uint64_t end) {
  do {
    if (block.load_acquire(word) >= at_least) return true;
  } while (block.nanoseconds() < end);
  return false;
}

template <class Block>
BATON_DEVICE void wait_word(Block& block, const WaitWord& a) {
  block.each([&](uint32_t thread) {
    if (thread != 0) return;
    const bool reached = wait_until(block, a.word, a.at_least, block.nanoseconds() + a.nanoseconds);
    block.store(a.reached + block.index(), reached ? 1u : 0u);
  });
}

}  // namespace baton::gpudirect::kernels
