// Authentication between workers, and the keys of the connection: before anything is parsed.
//
// Both sides prove that they hold a key of the cluster without sending it, and that their uid is
// their own. All messages before that proof have a fixed size, so an unauthenticated peer controls
// no length and no parser:
//
//   client -> server   opening  magic(8) highest version(4) purpose(2) lowest version(2) nonce(32)
//                      share(32) static key(32) key ids(2 * 16) offers(1) needs(1) zero(6)
//   server -> client   the same, with a zero purpose, and in place of the key ids: version(4),
//                      number of the key id(1), zero(27)
//   client -> server   proof(32), from version 6 on: n(2), n zeros
//   server -> client   verdict(4) proof(32), n zeros
//   both               length(4), HelloInfo, tag(16): AES-256-GCM
//
// The zeros make these two messages as long as a packet of the network, for whoever wants to know
// whether such packets come through; n is 0 for all others. They are read from a client that has
// proved itself. The server's verdict and proof go in a packet of their own, before the zeros: who
// has them knows that what filled a packet of his has come.
//
// Versions: each side names the lowest and the highest that it speaks; the highest that both speak
// counts. No third party between can make it a lower one: everything said goes into the keys.
//
// Keys: a key id is the beginning of HMAC(cluster key, "baton key id" | nonce), so it tells nothing
// to whoever does not hold that key. The client names all of its keys, the server takes the first
// of its own that is among them: while a cluster changes its key, both work.
//
// The key schedule, HKDF-SHA256 (RFC 5869) throughout:
//
//   root    extract(salt: both nonces, HMAC(cluster key, "baton handshake") | DH(share, share) |
//                   DH(client's static key, server's share) | DH(client's share, server's static))
//   proofs  expand(root, "baton client proof" or "... server proof" | hash of both openings)
//   infos   expand(root, "baton client info" or "... server info" | hash of both openings)
//   frames  expand(root, "baton client frames" or "... server frames" | hash of all that was said)
//
// DH is X25519. That of the shares makes past traffic unreadable to whoever gets the cluster key
// later, and to other members of the cluster; those of the static keys prove the uids, which are
// hashes of them (the triple exchange of Kudla and Paterson, ASIACRYPT 2005).
//
// The class is a state machine over bytes: it does no I/O, so every provider (and the fuzzer) uses
// the same one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "transport/identity.h"
#include "transport/net/ciphers/crypto.h"
#include "transport/net/link.h"

namespace baton::net {

// The first message of each side of a handshake: versions, shares of a key, ids of cluster keys.

inline constexpr std::string_view kMagic = "BATON\r\n\x1a";

struct Opening {
  static constexpr size_t kPrefixBytes = 8 + 4 + 2 + 2 + 32;  // all of it in versions to 3
  static constexpr size_t kIds = ClusterKey::kMost;
  static constexpr size_t kIdBytes = 16;
  static constexpr size_t kBytes = kPrefixBytes + 32 + 32 + kIds * kIdBytes + 8;
  static constexpr uint8_t kNoKey = 0xff;

  uint32_t highest = 0;  // version
  uint16_t purpose = 0;  // of a client
  uint16_t lowest = 0;
  Key32 nonce{};
  Key32 share{};
  Key32 static_key{};                                     // zeros: of no worker
  std::array<std::array<uint8_t, kIdBytes>, kIds> ids{};  // of a client
  uint32_t version = 0;                                   // of a server
  uint8_t which = kNoKey;                                 // of a server: of the ids
  Protections offers = kHeadsOnly;
  Protections needs = kHeadsOnly;

  std::string encode(bool client) const;
  // `bytes` are kBytes. What is reserved is not looked at.
  static Opening decode(std::string_view bytes, bool client);
};

struct Versions {
  uint16_t lowest = kLowestProtocol;
  uint16_t highest = kHighestProtocol;
};

class Handshake {
 public:
  enum class Role { kClient, kServer };
  enum class Purpose : uint16_t { kRail = 1, kQuery = 2 };

  struct Options {
    Purpose purpose = Purpose::kRail;  // of a client
    Versions versions;
    // The protections that this side supports and those that it requires (bits of Protection). The
    // handshake fails if either side requires one that the other does not support.
    Protections offers = kHeadsOnly;
    Protections needs = kHeadsOnly;
    // Both ends live in this process (a simulation): no attacker listens, and uids need no proof.
    // Both say so or neither.
    bool one_process = false;
  };

  Handshake(Role role, const ClusterKey& key, HelloInfo self, const Options& options);
  Handshake(Role role, const ClusterKey& key, HelloInfo self)
      : Handshake(role, key, std::move(self), Options()) {}

  // Bytes to send now (may be empty); call sent() when they are on their way.
  std::string_view to_send() const { return out_; }
  void sent(size_t bytes) {
    out_.erase(0, bytes);
    alone_ -= std::min(alone_, bytes);
  }
  // So many of them are to be in a packet of their own, before the others; 0: it does not matter.
  size_t alone() const { return alone_; }

  // How many bytes the next step needs; 0 once done(). Feed exactly that many.
  size_t wanted() const { return wanted_; }
  // An error ends the handshake: close the connection (after flushing to_send(), which may tell the
  // peer why). The message names the cause and the remedy.
  absl::Status receive(std::string_view bytes);

  // A client's, before it is fed: its proof and the answer to it are longer by so much,
  // kMostPadding at most, where the server's version has that.
  static constexpr size_t kMostPadding = 16 << 10;
  void pad(size_t bytes) { padding_ = bytes; }
  size_t padding() const { return padding_; }
  // A client has said its long message, and the server owes the verdict; or it has told that, and
  // owes its own.
  bool waits_for_verdict() const { return state_ == State::kVerdict && says_padding(); }
  bool waits_for_padding() const { return state_ == State::kPadding && says_padding(); }

  // True once the peer is authenticated and its HelloInfo is known. to_send() may still hold bytes.
  bool done() const { return state_ == State::kDone; }
  // True if the caller named a key of ours in its first message. Strangers cannot do that, except
  // by replaying a recorded message. It proves nothing yet, and only earns the caller more patience
  // than a silent one.
  bool names_our_key() const { return opening_.which != Opening::kNoKey; }
  const HelloInfo& peer() const { return peer_; }
  const HelloInfo& self() const { return self_; }
  Purpose purpose() const { return purpose_; }
  // Once done().
  const LinkKeys& keys() const { return keys_; }

 private:
  enum class State {
    kPrefix,
    kOpening,
    kProof,
    kVerdict,
    kPadding,
    kLength,
    kInfo,
    kDone,
    kFailed
  };

  void open();
  absl::Status on_prefix(std::string_view bytes);
  absl::Status on_opening(std::string_view bytes);
  absl::Status answer(const Opening& theirs);
  absl::Status check_answer(const Opening& theirs);
  absl::Status protect(const Opening& theirs);
  absl::Status derive_root(const Opening& theirs, size_t which);
  bool padded() const { return opening_.version >= kPaddedProtocol; }
  bool says_padding() const { return role_ == Role::kClient && padding_ > 0 && padded(); }
  absl::Status on_proof(std::string_view bytes);
  void accept();
  absl::Status on_verdict(std::string_view bytes);
  absl::Status on_length(std::string_view bytes);
  absl::Status on_info(std::string_view bytes);
  void send_info();
  Key32 derive(Role of, std::string_view what) const;
  Role other() const { return role_ == Role::kClient ? Role::kServer : Role::kClient; }
  void expect(State state, size_t bytes);

  Role role_;
  const ClusterKey& key_;
  HelloInfo self_;
  HelloInfo peer_;
  const Options options_;
  Purpose purpose_;
  State state_ = State::kPrefix;
  size_t wanted_ = 0;
  size_t padding_ = 0;
  std::string out_;
  size_t alone_ = 0;
  Opening opening_;  // ours
  Key32 share_{};    // the private half of it
  std::optional<Key32> static_key_;
  WorkerUid peer_uid_;  // proved
  std::string client_opening_;
  std::string server_opening_;
  Key32 root_{};
  Key32 said_{};  // hash of all that was said so far: of the openings, in the end of the infos too
  std::string sent_info_;
  std::string length_;  // of the peer's info, as it came
  LinkKeys keys_;
};

}  // namespace baton::net
