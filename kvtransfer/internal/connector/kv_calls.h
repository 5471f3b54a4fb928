// Connections to the workers that loads come from, by their addresses. A name is looked up beside,
// for as long as DNS takes.
#pragma once

#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "transport/base/threads/calls_beside.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class KvCalls {
 public:
  explicit KvCalls(Worker& worker) : worker_(worker), names_([&worker] { worker.wake(); }) {}

  // The connection to the worker at `address`, made where there is none or the last one went down.
  // Generation 0: a name is being looked up, and take_ended() will say what came of it.
  absl::StatusOr<PeerId> call(const std::string& address);
  // The addresses whose look-ups have ended since, each with its connection or why there is none.
  // The worker is woken when there is one.
  using Names = base::CallsBeside<std::string, absl::StatusOr<PeerId>>;
  Names::Ended take_ended();
  void on_peer_down(PeerId peer);
  // Waits for the look-ups that have begun; others do not begin. Before the worker goes.
  void close() { names_.close(); }

 private:
  Worker& worker_;
  absl::flat_hash_map<std::string, PeerId> connected_;
  Names names_;
};

}  // namespace baton::kvtransfer
