// What ranks and their rendezvous say to each other once both have proved that they hold the key.
//
//   frame     length(4) of the body, type(1), body
//   join      a rank: how long it will wait, in ms (8), and its info
//   info      the server: one per rank, in their order
//   refusal   the server instead: absl code(1), message
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/launch/rendezvous.h"
#include "transport/clock.h"
#include "transport/identity.h"
#include "transport/net/endpoint.h"

namespace baton::launch {

inline constexpr size_t kMaxRankInfoBytes = 64 << 10;
inline constexpr size_t kMaxFrameBody = kMaxRankInfoBytes + sizeof(uint64_t);

enum class FrameType : uint8_t { kJoin = 1, kRankInfo = 2, kRefusal = 3 };

struct Frame {
  FrameType type = FrameType::kJoin;
  std::string body;
};

std::string encode_frame(FrameType type, std::string_view body);
// Takes the first frame off the front of `in`; false: it is not whole yet.
absl::StatusOr<bool> take_frame(std::string& in, Frame& frame);

struct Join {
  Time patience = kNever;
  collectives::RankInfo info;
};
std::string encode_join(const Join& join);
absl::StatusOr<Join> decode_join(std::string_view body);

std::string encode_refusal(const absl::Status& why);
// The error that was sent; never OK.
absl::Status decode_refusal(std::string_view body);

// Options of both ends' sockets.
const net::SocketOptions& rendezvous_sockets();

// How both ends introduce themselves, so that neither takes a worker's port for a rendezvous.
HelloInfo rendezvous_hello();
bool is_rendezvous(const HelloInfo& peer);

}  // namespace baton::launch
