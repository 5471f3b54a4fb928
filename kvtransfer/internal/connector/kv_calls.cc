// Connections by address.
#include "kvtransfer/internal/connector/kv_calls.h"

#include "kvtransfer/agent.h"

namespace baton::kvtransfer {

absl::StatusOr<PeerId> KvCalls::call(const std::string& address) {
  if (const auto it = connected_.find(address); it != connected_.end()) {
    if (worker_.peer_state(it->second) != PeerState::kDown) return it->second;
  }
  if (!asks_dns(address)) {
    absl::StatusOr<PeerId> peer = worker_.connect(address);
    if (peer.ok()) connected_[address] = *peer;
    return peer;
  }
  if (!names_.contains(address) &&
      !names_.begin(address, [this, address] { return worker_.connect(address); })) {
    return absl::ResourceExhaustedError("no thread to look a name up: raise `ulimit -u`");
  }
  return PeerId();
}

KvCalls::Names::Ended KvCalls::take_ended() {
  Names::Ended ended = names_.take_ended();
  for (const auto& [address, peer] : ended) {
    if (peer.ok()) connected_[address] = *peer;
  }
  return ended;
}

void KvCalls::on_peer_down(PeerId peer) {
  absl::erase_if(connected_, [&](const auto& entry) { return entry.second == peer; });
}

}  // namespace baton::kvtransfer
