// What the handles of the fake connection manager really are.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>

#include "tests/verbs/fake/fake_cm.h"

namespace baton {

struct FakeCmChannel {
  rdma_event_channel channel{};
  struct Event {
    rdma_cm_event event{};
    std::string data;
    FakeCmId* id = nullptr;  // whom it counts for
  };
  std::list<std::unique_ptr<Event>> events;
  std::list<std::unique_ptr<Event>> unacknowledged;
};

struct FakeCmId {
  rdma_cm_id id{};
  enum class State { kNew, kBound, kListening, kAddress, kRoute, kCalling, kCalled, kUp, kOver };
  State state = State::kNew;
  FakeCmChannel* channel = nullptr;
  FakeCmId* peer = nullptr;
  bool stranger = false;  // whoever called is none of ours
  size_t device = 0;
  uint16_t port = 0;  // listening, or called
  size_t peer_device = 0;
  uint32_t sequence = 0;
  uint32_t peer_sequence = 0;
  uint32_t queue_pair = 0;
  bool asked_for_rts = false;
  std::function<void()> next;  // what the kernel does in the next tick
};

// The handle is the first member of each, so a pointer to one is a pointer to the other.
inline FakeCmId& fake_of(rdma_cm_id* id) { return *reinterpret_cast<FakeCmId*>(id); }
inline FakeCmChannel& fake_of(rdma_event_channel* channel) {
  return *reinterpret_cast<FakeCmChannel*>(channel);
}

}  // namespace baton
