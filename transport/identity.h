// A worker's identity: the cluster's key, and what a worker tells a peer about itself after the
// handshake (transport/net/handshake.h) has authenticated both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton {

// The longest name of a worker, in bytes: what fits into its address and its introduction.
inline constexpr size_t kMaxWorkerName = 64;

// The secret that the workers of one cluster share. At least 16 bytes. While the cluster changes
// from one to another, a worker holds both: it proves itself by whichever its peer has too.
class ClusterKey {
 public:
  static constexpr size_t kMost = 2;

  static absl::StatusOr<ClusterKey> from_bytes(std::string_view secret);
  // Text: the key, and in a second line the one before while that is in use; else it is one key.
  // PermissionDenied unless this user's or root's alone: 0600 or less, or, to let a group of this
  // process read root's file, 0640 or less. A file that is being replaced gives its old key or its
  // new one. One that is written to is waited for until it stands still; Unavailable after 2 s.
  static absl::StatusOr<ClusterKey> from_file(const std::string& path);
  // The key of this user on this machine: $BATON_KEY_FILE unless empty, else baton/cluster.key in
  // $XDG_CONFIG_HOME or in ~/.config, which is made (mode 0600, random) when it is missing. Without
  // HOME the home is the one of the user's account. FailedPrecondition: none can be made there.
  static absl::StatusOr<ClusterKey> for_this_user();

  // This key, and `previous` beside it: that one's own previous key is dropped.
  ClusterKey with_previous(const ClusterKey& previous) const;

  // How many keys this holds: 1, or 2 with the previous one.
  size_t count() const { return secrets_.size(); }
  // HMAC-SHA256 by key number `which`, 0: the current one.
  std::array<uint8_t, 32> hmac(std::string_view message, size_t which = 0) const;

 private:
  std::vector<std::string> secrets_;
};

// How a new connection relates to its session.
enum class Resume : uint8_t {
  kNew,     // its first, or one more of those that make it up
  kOurs,    // all were lost; the worker that chose the session calls again
  kTheirs,  // all were lost; the other one calls
};

// A longer address is not sent: the peer cannot call such a worker back, so the worker calls.
inline constexpr size_t kMaxHelloAddress = 640;

// A number that no other rail has, dialled by this process or by another one, also over time: both
// sides of a session dial. Its lowest 20 bits are zero: a provider whose rails come back by
// themselves counts there.
uint64_t link_number();

// Versions of the protocol between workers: the lowest that this release speaks, and the highest.
// From version 5 on a worker can be asked to part (kPart); one of version 4 takes that for
// nonsense. From version 6 on a handshake may hold a message as long as a packet. From version 7 on
// staging rings have marks, and are lent.
inline constexpr uint16_t kLowestProtocol = 4;
inline constexpr uint16_t kHighestProtocol = 7;
inline constexpr uint16_t kPartingProtocol = 5;
inline constexpr uint16_t kPaddedProtocol = 6;
inline constexpr uint16_t kLendingProtocol = 7;

// The worker at the other end, as told after authentication.
struct HelloInfo {
  WorkerUid uid;         // zeros: no worker (a rank that meets others); else proved to be its own
  std::string name;      // at most kMaxWorkerName, for people: "decode-0"
  uint64_t session = 0;  // chosen by the connecting worker; groups the rails of one connection
  uint64_t link = 0;     // of this rail alone, chosen by the side that dialled it: link_number()
  Resume resume = Resume::kNew;
  uint16_t rail = 0;   // of this connection in the session
  uint16_t rails = 1;  // how many the session will have
  uint32_t pid = 0;
  std::string extra;    // provider-specific, at most 512 bytes
  std::string address;  // where it listens, encoded, at most kMaxHelloAddress bytes; or nothing
  // The highest that both speak. Not among what is told here: the handshake found it out before.
  uint16_t protocol = kHighestProtocol;

  std::string encode() const;
  static absl::StatusOr<HelloInfo> decode(std::string_view bytes);
};

}  // namespace baton
