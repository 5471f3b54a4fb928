// How kernels ask the host to start transfers: the producers of a TriggerFifo.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

enum class Pushed : uint32_t { kFull, kYes, kClosed };

// Whether this thread may take a place: then what was there has been taken by the host. Places are
// granted and taken by two counts, so that no thread tries again because others were quicker.
template <class Block>
BATON_DEVICE Pushed grant_place(Block& block, const TriggerQueue& queue) {
  const uint64_t seen = block.look(queue.seen_tail);
  if ((seen & TriggerQueue::kClosed) != 0) return Pushed::kClosed;
  const uint64_t granted = block.count_up(queue.granted);
  if (static_cast<int64_t>(granted - seen) < static_cast<int64_t>(queue.capacity)) {
    return Pushed::kYes;
  }
  block.count_down(queue.granted);
  return Pushed::kFull;
}

// Whether it is worth trying: a thread that would be refused leaves the count alone for others.
template <class Block>
BATON_DEVICE bool seems_full(Block& block, const TriggerQueue& queue) {
  const uint64_t seen = block.look(queue.seen_tail);
  return (seen & TriggerQueue::kClosed) == 0 &&
         static_cast<int64_t>(block.look(queue.granted) - seen) >=
             static_cast<int64_t>(queue.capacity);
}

// The host's word is far away, and many that ask for it at once keep what is pushed from the host:
// one thread of the device does.
template <class Block>
BATON_DEVICE void look_at_tail(Block& block, const TriggerQueue& queue) {
  if (block.look(queue.looking) != 0 || !block.claim(queue.looking)) return;
  block.raise(queue.seen_tail, block.load_acquire(queue.tail));
  block.give_back(queue.looking);
}

template <class Block>
BATON_DEVICE Pushed push_once(Block& block, const TriggerQueue& queue, const Trigger& trigger,
                              bool again) {
  Pushed granted = Pushed::kFull;
  if (!again || !seems_full(block, queue)) granted = grant_place(block, queue);
  if (granted == Pushed::kFull) {
    look_at_tail(block, queue);
    if (!seems_full(block, queue)) granted = grant_place(block, queue);
  }
  if (granted != Pushed::kYes) return granted;
  const uint64_t at = block.count_up(queue.head);
  // The bit of this lap; it alternates between laps, so that the bits need no clearing
  // and the host can tell for either word whether it has arrived.
  const uint64_t lap = (at / queue.capacity & 1) ^ 1;
  // What has no such number asks for a transfer that was never prepared.
  constexpr uint32_t kMost = 0x7fffffff;
  const uint64_t transfer = trigger.epoch > kMost ? kMost : smaller(trigger.transfer, kMost);
  block.store_release(queue.slots + 2 * (at & (queue.capacity - 1)),
                      transfer | lap << 31 | uint64_t{trigger.first} << 32,
                      uint64_t{trigger.count} | lap << 32 | uint64_t{trigger.epoch} << 33);
  return Pushed::kYes;
}

// False: the queue is full or closed, or seems full while another thread asks the host; and nothing
// was pushed. What this thread has written before
// is seen by whoever takes the trigger; of other threads' writes, what a barrier before it has
// ordered. What one thread pushes is taken in its order.
template <class Block>
BATON_DEVICE bool push_trigger(Block& block, const TriggerQueue& queue, const Trigger& trigger) {
  return push_once(block, queue, trigger, false) == Pushed::kYes;
}

// The same; where the queue is full, again and again until `end` on the block's clock.
template <class Block>
BATON_DEVICE bool push_trigger_until(Block& block, const TriggerQueue& queue,
                                     const Trigger& trigger, uint64_t end) {
  Pushed pushed = push_once(block, queue, trigger, false);
  while (pushed == Pushed::kFull && block.nanoseconds() < end) {
    block.rest();
    pushed = push_once(block, queue, trigger, true);
  }
  return pushed == Pushed::kYes;
}

template <class Block>
BATON_DEVICE void push_triggers(Block& block, const PushTriggers& a) {
  const uint64_t end = block.nanoseconds() + a.nanoseconds;
  block.each([&](uint32_t thread) {
    for (uint32_t i = block.index() * block.threads() + thread; i < a.count;
         i += block.blocks() * block.threads()) {
      const bool pushed = push_trigger_until(block, a.queue, block.load(a.triggers + i), end);
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
      if (!push_trigger_until(block, a.queue, a.trigger, end)) return;
    }
  });
}

}  // namespace baton::gpudirect::kernels
