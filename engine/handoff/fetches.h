// Asks agents at addresses that requests name for their metadata. A name is looked up by a thread
// of its own, for as long as DNS takes: the service's does not wait for it.
#pragma once

#include <future>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/handoff/core.h"

namespace baton::engine::handoff {

class Fetches {
 public:
  // `core` must outlive this object.
  explicit Fetches(const Core& core) : core_(core) {}

  // Asks, or says what came of asking before: OK is no more than that nothing has failed yet.
  absl::Status fetch(const std::string& agent, const std::string& address);
  // Waits for the look-ups that have begun. Before the agent goes.
  void close() { running_.clear(); }

 private:
  struct Fetch {
    std::string agent, address;
    std::future<absl::Status> result;
  };

  const Core& core_;
  std::vector<Fetch> running_;
};

}  // namespace baton::engine::handoff
