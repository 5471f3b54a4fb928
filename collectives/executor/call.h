// A call as the other ranks see it: what must be equal at all of them.
#pragma once

#include <cstdint>
#include <string>

#include "collectives/schedules/schedule.h"

namespace baton::collectives::executor {

// Plain data: lies in shared memory and travels in messages.
struct CallDescriptor {
  uint64_t sequence = 0;  // of the call among the collectives of this communicator, from 1
  uint64_t count = 0;     // elements
  uint64_t part_elements = 0;
  uint32_t root = 0;
  uint32_t node_size = 0;
  uint16_t channels = 1;
  uint8_t collective = 0;
  uint8_t type = 0;
  uint8_t op = 0;
  uint8_t algorithm = 0;
  uint8_t ordered = 0;
  uint8_t of_v = 0;  // an all_to_all_v, or a message of one; an all_gather_v, a reduce_scatter_v

  // For a message of an all_to_all_v: the low half of that call's sequence (stored in node_size,
  // which has no other use there).
  uint32_t whole() const { return node_size; }

  // For an all_gather_v or a reduce_scatter_v, of which `count` is the sum of all lengths: a number
  // that is equal where they are (stored in root, which has no other use there).
  uint32_t lengths() const { return root; }

  bool operator==(const CallDescriptor&) const = default;
  // Equal descriptors give equal values, others almost surely not. Never 0.
  uint32_t fingerprint() const;
  // "all_reduce #17 of 1048576 f32 (sum), ring"
  std::string to_string() const;
};
static_assert(sizeof(CallDescriptor) == 40);

}  // namespace baton::collectives::executor
