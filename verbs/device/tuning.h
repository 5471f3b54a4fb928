// The settings of the verbs provider, checked. The table in tuning.cc declares them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/provider.h"

namespace baton::verbs {

struct Tuning {
  std::vector<std::string> devices;  // "name" or "name:port"; empty: all with an active port
  uint32_t queue_pairs = 1;          // per pair of ports
  uint32_t pairs = 0;                // of ports, at most; 0: every port of either side is in one
  int gid_index = -1;
  uint32_t mtu = 4096;  // at most; the connection takes the least of both ports' and this
  uint32_t send_depth = 256;
  uint32_t receive_depth = 128;     // credits of a queue pair's peer, at most
  uint32_t shared_receives = 4096;  // of a device, at most; 0: every queue pair has its own
  uint32_t inline_bytes = 220;
  size_t slice_bytes = 1 << 20;
  size_t inflight_bytes = 4 << 20;  // per queue pair: what a cancel has to wait for
  uint8_t timeout = 0;              // 4.096 us * 2^timeout per attempt; 0: see for_session()
  uint8_t retry_count = 6;          // rdma_rxe retries without end for 7
  uint8_t rnr_retry = 3;
  uint8_t rd_atomic = 16;
  uint8_t traffic_class = 0;
  uint8_t service_level = 0;
  bool relaxed_ordering = true;
  Time stall = std::chrono::seconds(2);       // a work request that takes longer hangs
  Time port_grace = std::chrono::seconds(5);  // a port may be down, while it is the last one
  Time hold = std::chrono::seconds(1);        // a lost rail stays away that long
  Time settle = std::chrono::seconds(2);      // for the peer to say what a broken rail delivered
  Time connect = std::chrono::seconds(5);
  Time probe = std::chrono::seconds(1);  // a quiet queue pair asks whether the peer is there

  // With what depends on whether another rail could take over: a rail that could be replaced is
  // given up soon, the only one late.
  Tuning for_session(bool redundant) const;
  // How long the adapter tries before it reports that a peer does not answer. Of a session.
  Time detection() const;
};

// The settings of the verbs provider, as it registers them.
absl::Span<const Setting> verbs_settings();

absl::StatusOr<Tuning> read_tuning(const ProviderContext& context);

}  // namespace baton::verbs
