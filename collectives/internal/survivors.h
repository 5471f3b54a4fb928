// The survivors of a failure: they agree on who is left, and where they meet anew.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/internal/failure_detector.h"
#include "collectives/internal/mesh.h"
#include "collectives/rendezvous.h"

namespace baton::collectives::internal {

// Everything under the communicator's lock.
class Survivors {
 public:
  Survivors(const CommunicatorOptions& options, Mesh& mesh, FailureDetector& failure)
      : options_(options), mesh_(mesh), failure_(failure), ballots_(mesh.ranks()) {}

  void on_ballot(uint32_t from, std::string_view body);
  // Breaks the communicator if it is not broken yet. Returns once all survivors have named the same
  // ranks as lost: what the new communicator is to be created with. This object may have to serve
  // its rendezvous, and must live until it has been created.
  absl::StatusOr<CommunicatorOptions> agree();

 private:
  // One byte per rank: '1' for those that are lost.
  std::string lost(bool late);

  const CommunicatorOptions& options_;
  Mesh& mesh_;
  FailureDetector& failure_;
  std::vector<std::string> ballots_;  // what the others voted last, by rank
  std::unique_ptr<RendezvousServer> server_;
};

}  // namespace baton::collectives::internal
