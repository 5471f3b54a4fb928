// How kernels ask the host to start transfers: the producers of a TriggerFifo.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// False: the queue is full, and nothing was pushed. What this thread has written before is seen by
// whoever takes the trigger; of other threads' writes, what a barrier before it has ordered.
template <class Block>
BATON_DEVICE bool push_trigger(Block& block, const TriggerQueue& queue, const Trigger& trigger) {
  uint64_t at = 0;
  do {
    at = block.load_acquire(queue.head);
    // The host's word is far away: it is read when the one read before says that all is full.
    if (at - block.load_acquire(queue.seen_tail) >= queue.capacity) {
      const uint64_t tail = block.load_acquire(queue.tail);
      if (at - tail >= queue.capacity) return false;
      block.store_release(queue.seen_tail, tail);
    }
  } while (!block.exchange(queue.head, at, at + 1));
  uint64_t* const slot = queue.slots + 2 * (at & (queue.capacity - 1));
  // Of this lap: in the one before, the bit was the other way round. So nobody has to clear it.
  const uint64_t lap = (at / queue.capacity & 1) ^ 1;
  block.store(slot, uint64_t{trigger.transfer} | uint64_t{trigger.first} << 32);
  block.store_release(slot + 1,
                      uint64_t{trigger.count} | uint64_t{trigger.epoch} << 33 | lap << 32);
  return true;
}

template <class Block>
BATON_DEVICE void push_triggers(Block& block, const PushTriggers& a) {
  block.each([&](uint32_t thread) {
    for (uint32_t i = block.index() * block.threads() + thread; i < a.count;
         i += block.blocks() * block.threads()) {
      const bool pushed = push_trigger(block, a.queue, block.load(a.triggers + i));
      block.store(a.accepted + i, pushed ? 1u : 0u);
    }
  });
}

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

template <class Block>
BATON_DEVICE void answer_words(Block& block, const AnswerWords& a) {
  block.each([&](uint32_t thread) {
    if (thread != 0 || block.index() != 0) return;
    const uint64_t end = block.nanoseconds() + a.nanoseconds;
    for (uint64_t i = 1; i <= a.count; ++i) {
      if (!wait_until(block, a.word, i, end)) return;
      while (!push_trigger(block, a.queue, a.trigger)) {
        if (block.nanoseconds() >= end) return;
      }
    }
  });
}

}  // namespace baton::gpudirect::kernels
