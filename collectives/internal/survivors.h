// After a failure the survivors agree on the ranks that are left.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"

namespace baton::collectives::internal {

// Everything under the endpoint's lock.
class Survivors {
 public:
  Survivors(const CommunicatorOptions& options, Mesh& mesh, FailureDetector& failure)
      : options_(options), mesh_(mesh), failure_(failure) {}

  // For a group that begins.
  void begin() { ballots_.assign(mesh_.ranks(), {}); }
  void on_ballot(uint32_t from, std::string_view body);
  // Breaks the communicator if it is not broken yet. Returns once all survivors have named the same
  // ranks as lost: those that are left, in order. Waits without `lock`.
  absl::StatusOr<std::vector<int>> agree(EndpointImpl::Lock& lock);

 private:
  // One byte per rank: '1' for those that are lost.
  std::string lost(bool late);

  const CommunicatorOptions& options_;
  Mesh& mesh_;
  FailureDetector& failure_;
  std::vector<std::string> ballots_;  // what the others voted last, by rank
};

}  // namespace baton::collectives::internal
