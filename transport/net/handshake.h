// Authentication between workers: magic, version and an HMAC challenge, before anything is parsed.
//
// Both sides prove that they hold the cluster key without sending it. All messages before that
// proof have a fixed size, so an unauthenticated peer controls no length and no parser:
//
//   client -> server   magic(8) version(4) purpose(4) nonce(32)
//   server -> client   magic(8) version(4) zero(4) nonce(32)
//   client -> server   HMAC-SHA256(key, "baton client" | first message | second message)
//   server -> client   verdict(4), HMAC-SHA256(key, "baton server" | both messages)
//   both               length(4), HelloInfo,
//                      HMAC-SHA256(key, "baton client info" or "... server info" | both messages |
//                      HelloInfo)
//
// The class is a state machine over bytes: it does no I/O, so every provider (and the fuzzer) uses
// the same one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "transport/identity.h"

namespace baton::net {

inline constexpr uint32_t kProtocolVersion = 3;

class Handshake {
 public:
  enum class Role { kClient, kServer };
  enum class Purpose : uint32_t { kRail = 1, kQuery = 2 };

  Handshake(Role role, const ClusterKey& key, HelloInfo self, Purpose purpose = Purpose::kRail);

  // Bytes to send now (may be empty); call sent() when they are on their way.
  std::string_view to_send() const { return out_; }
  void sent(size_t bytes) { out_.erase(0, bytes); }

  // How many bytes the next step needs; 0 once done(). Feed exactly that many.
  size_t wanted() const { return wanted_; }
  // An error ends the handshake: close the connection (after flushing to_send(), which may tell the
  // peer why). The message names the cause and the remedy.
  absl::Status receive(std::string_view bytes);

  // True once the peer is authenticated and its HelloInfo is known. to_send() may still hold bytes.
  bool done() const { return state_ == State::kDone; }
  const HelloInfo& peer() const { return peer_; }
  const HelloInfo& self() const { return self_; }
  Purpose purpose() const { return purpose_; }

 private:
  enum class State { kHello, kProof, kVerdict, kLength, kInfo, kDone, kFailed };
  absl::Status on_hello(std::string_view bytes);
  absl::Status on_proof(std::string_view bytes);
  absl::Status on_verdict(std::string_view bytes);
  absl::Status on_length(std::string_view bytes);
  void send_info();
  std::array<uint8_t, 32> info_proof(Role of, std::string_view info) const;
  void expect(State state, size_t bytes);

  Role role_;
  const ClusterKey& key_;
  HelloInfo self_;
  HelloInfo peer_;
  Purpose purpose_;
  State state_ = State::kHello;
  size_t wanted_ = 0;
  std::string out_;
  std::string client_hello_;
  std::string server_hello_;
};

}  // namespace baton::net
