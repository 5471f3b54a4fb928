// An agent's metadata on its way to another: who it is, where it listens, and which memory it gives
// away, under a code that only holders of the cluster's key can make.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvtransfer/agent.h"

namespace baton::kvtransfer {

struct AgentMetadata {
  bool partial = false;    // adds to what is known
  bool withdrawn = false;  // a farewell: forget what is known
  std::string name;
  WorkerUid uid;
  std::string address;  // Worker::address(); "" if partial and without
  std::vector<std::pair<Descriptor, RemoteRegion>> ranges;

  static constexpr uint16_t kVersion = 1;
  std::string encode(const ClusterKey& key) const;
  // DataLoss says whether it is no metadata at all, of another version, or damaged or of another
  // cluster.
  static absl::StatusOr<AgentMetadata> decode(std::string_view bytes, const ClusterKey& key);
  // What lies between the version and the code.
  static absl::StatusOr<AgentMetadata> decode_body(std::string_view body);
};

}  // namespace baton::kvtransfer
