// Protecting the frames of a connection: each has a number, and a tag that only the other end can
// have made for that number. What is changed, repeated, left out or moved is found out.
//
//   head      length(4) bytes(length) tag(16)
//   payload   bytes, and tag(16) where Protection is kIntegrity or kEncrypt
//
// kHeads and kIntegrity: a head's tag is SipHash-2-4-128 of number, length and bytes. kIntegrity: a
// payload's is AES-256-GCM's of the bytes as they are (GMAC). kEncrypt: heads and payload are
// AES-256-GCM's, the length of a head under its tag. Each use has a key of its own, and head and
// payload of a frame have its number as their nonce: a payload fits its head and no other.
//
// A number is never used for two texts. Frames are numbered from 0 in each direction, and 2^64 of
// them outlive any connection.
#pragma once

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "transport/net/ciphers/crypto.h"
#include "transport/net/ciphers/siphash.h"
#include "transport/net/link.h"

namespace baton::net {

inline constexpr size_t kSealPrefix = 4;  // in front of a head
inline constexpr size_t kSealTag = 16;
inline constexpr size_t kSealBytes = kSealPrefix + kSealTag;  // a head is longer by that

class Seal {
 protected:
  Seal(const Key32& key, Protection protection, Aead::Direction direction);
  SipHash::Tag head_tag(uint64_t number, const char* at, size_t bytes) const {
    return heads_(number, {at, kSealPrefix + bytes});
  }

 public:
  // Payload has a tag.
  bool payload() const { return protection_ != Protection::kHeads; }
  Protection protection() const { return protection_; }

 protected:
  const Protection protection_;
  SipHash heads_;
  std::optional<Aead> head_cipher_;  // kEncrypt
  std::optional<Aead> payload_;
};

class Sealer : public Seal {
 public:
  Sealer(const Key32& key, Protection protection) : Seal(key, protection, Aead::Direction::kSeal) {}

  // The number of the next frame.
  uint64_t next() const { return next_; }

  // `at`: kSealPrefix bytes, a head of `bytes`, kSealTag bytes. Heads must leave in the order in
  // which they were sealed.
  void head(char* at, size_t bytes) { head(at, bytes, next_++); }
  // A frame that has not left gets another head in place of its own. Not for kEncrypt.
  void head_again(char* at, size_t bytes, uint64_t number) { head(at, bytes, number); }

  // The payload of frame next(), piece by piece and before its head. `to` may be `from`.
  void start_payload() { payload_->start(next_); }
  void payload(const void* from, size_t bytes, void* to);
  void end_payload(void* tag) { payload_->seal(tag); }
  using Seal::payload;

 private:
  void head(char* at, size_t bytes, uint64_t number);

  uint64_t next_ = 0;
};

class Opener : public Seal {
 public:
  Opener(const Key32& key, Protection protection) : Seal(key, protection, Aead::Direction::kOpen) {}

  enum class Found { kMore, kHead, kForged };
  // `at`: bytes of a connection from where a head begins, `have` of them. kHead: `head` is it, in
  // place, kSealBytes shorter than what it took. kForged: the other end did not make this.
  Found head(char* at, size_t have, size_t most, std::string_view& head) {
    uint32_t bytes;
    if (have < kSealPrefix) return Found::kMore;
    std::memcpy(&bytes, at, sizeof bytes);
    if (bytes > most) return Found::kForged;
    if (have < bytes + kSealBytes) return Found::kMore;
    head = {at + kSealPrefix, bytes};
    return open(at, bytes, next_++) ? Found::kHead : Found::kForged;
  }

  // The payload behind the head that was opened last, piece by piece, in place: plain afterwards,
  // and good only if end_payload() is true.
  void start_payload() { start_payload(next_ - 1); }
  void start_payload(uint64_t number) { payload_->start(number); }
  void payload(void* data, size_t bytes);
  [[nodiscard]] bool end_payload(const void* tag) { return payload_->open(tag); }
  using Seal::payload;

  // For frames that carry their numbers, and may come in any order.
  [[nodiscard]] bool open(char* at, size_t bytes, uint64_t number);

 private:
  uint64_t next_ = 0;
};

// Tracks which frame numbers have been seen, for frames that arrive in any order.

// As in RFC 4303, section 3.4.3: the numbers seen last, as bits. One that is older than all of them
// is taken for seen.
class ReplayWindow {
 public:
  static constexpr uint64_t kNumbers = 4096;

  bool seen(uint64_t number) const {
    if (number >= next_) return false;
    return next_ - number > kNumbers || seen_[number % kNumbers];
  }
  // To be called once the frame is known to be the peer's.
  void add(uint64_t number) {
    if (number >= next_ && number - next_ >= kNumbers) seen_.reset();
    for (uint64_t each = next_; each < number && number - next_ < kNumbers; ++each) {
      seen_[each % kNumbers] = false;
    }
    next_ = std::max(next_, number + 1);
    seen_[number % kNumbers] = true;
  }

 private:
  uint64_t next_ = 0;
  std::bitset<kNumbers> seen_;
};

}  // namespace baton::net
