// Addresses: how to reach a worker, as text that fits on a command line.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton {

// A worker and the ways to reach it. Holds no secret.
struct Address {
  WorkerUid uid;
  std::string name;
  std::string host_id;  // same machine and same namespaces <=> equal
  std::vector<std::pair<std::string, std::string>> providers;  // (name, address)

  // "baton1:" and web-safe base64. decode() accepts nothing longer than 4 KiB.
  std::string encode() const;
  static absl::StatusOr<Address> decode(std::string_view text);
};

// Identifies this machine and what decides whether shared memory works: boot id, network and
// process namespace, user.
std::string this_host_id();

// True if both hosts, as above, share one network, so that 127.0.0.1 is the same place for both.
// Two users of one machine share the network, but no memory.
bool same_network(std::string_view host_id, std::string_view other);

}  // namespace baton
