// The messages between ranks and their rendezvous after both have proved that they hold the key.
// They are encrypted and numbered (transport/net/message_stream.h).
//
//   message   type(1), body
//   join      a rank: how long it will wait, in ms (8), and its info
//   info      the server: one per rank, in their order
//   refusal   the server instead: absl code(1), message
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/rendezvous.h"
#include "transport/clock.h"
#include "transport/identity.h"
#include "transport/net/endpoint.h"
#include "transport/net/message_stream.h"

namespace baton::launch {

inline constexpr size_t kMaxRankInfoBytes = 64 << 10;
inline constexpr size_t kMaxBody = kMaxRankInfoBytes + sizeof(uint64_t);

enum class MessageType : uint8_t { kJoin = 1, kRankInfo = 2, kRefusal = 3 };

struct Message {
  MessageType type = MessageType::kJoin;
  std::string_view body;
};

std::string encode_message(MessageType type, std::string_view body);
// `body` is within `bytes`.
absl::StatusOr<Message> decode_message(std::string_view bytes);

struct Join {
  Time patience = kNever;
  collectives::RankInfo info;
};
std::string encode_join(const Join& join);
absl::StatusOr<Join> decode_join(std::string_view body);

std::string encode_refusal(const absl::Status& why);
// The error that was sent; never OK.
absl::Status decode_refusal(std::string_view body);

// Options of both ends' sockets and streams.
const net::SocketOptions& rendezvous_sockets();
const net::MessageStream::Options& rendezvous_stream();

// How both ends introduce themselves, so that neither takes a worker's port for a rendezvous.
HelloInfo rendezvous_hello();
bool is_rendezvous(const HelloInfo& peer);
// The error for a peer that authenticated but is not a rendezvous server.
absl::Status no_rendezvous(const HelloInfo& peer, const std::string& where);

}  // namespace baton::launch
