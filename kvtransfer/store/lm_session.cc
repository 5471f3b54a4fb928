// Requests of the `lm://` wire, carried out against an arena.
#include "kvtransfer/store/lm_session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace baton::kvtransfer::store {
namespace {

constexpr size_t kListBytes = 64 << 10;  // of keys in one answer
constexpr Time kPatience = std::chrono::seconds(20);
constexpr size_t kSlowest = 1 << 20;  // bytes of a value per second

// What lies beside a value: how the client described it, and its sum. Values lie in the arena
// behind their key.
struct Tag {
  LmMeta meta;
  uint64_t sum = 0;
};
constexpr size_t kTagBytes = sizeof(LmMeta) + sizeof(uint64_t);
static_assert(kTagBytes == 36);

const tiers::TierKey& key_for(std::string_view name, tiers::TierKey* key) {
  static const auto* keys = new tiers::TierKeys({.layout = "lm wire"});
  return *key = keys->key(name);
}

std::string pack(const Tag& tag) {
  std::string out(kTagBytes, '\0');
  std::memcpy(out.data(), &tag.meta, sizeof(tag.meta));
  std::memcpy(out.data() + sizeof(tag.meta), &tag.sum, sizeof(tag.sum));
  return out;
}

std::optional<Tag> unpack(std::string_view bytes) {
  Tag tag;
  if (bytes.size() != kTagBytes) return std::nullopt;
  std::memcpy(&tag.meta, bytes.data(), sizeof(tag.meta));
  std::memcpy(&tag.sum, bytes.data() + sizeof(tag.meta), sizeof(tag.sum));
  return tag;
}

uint64_t sum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

// Thrown-away bytes of all sessions; no code reads it.
std::span<std::byte> waste() {
  thread_local std::array<std::byte, 64 << 10> bytes;
  return bytes;
}

}  // namespace

std::span<std::byte> LmSession::room() {
  if (!in_value_) return std::span(header_).subspan(have_);
  const size_t left = expected_ - arrived_;
  if (incoming_ == nullptr) return waste().first(std::min(left, waste().size()));
  return incoming_->bytes().subspan(kLmKey + arrived_, left);
}

void LmSession::filled(size_t bytes, Time now) {
  if (!in_value_) {
    have_ += bytes;
    if (have_ == header_.size()) take_request(now);
    return;
  }
  arrived_ += bytes;
  if (arrived_ == expected_) keep_value();
}

void LmSession::take_request(Time now) {
  request_ = decode_lm_request(header_);
  have_ = 0;
  spoken_ = true;
  ++turn_;
  turn_bytes_ = 0;
  switch (static_cast<LmCommand>(request_.command)) {
    case LmCommand::kPut:
      return begin_value(now);
    case LmCommand::kGet:
      return get();
    case LmCommand::kExist: {
      tiers::TierKey key;
      const bool here = arena_.contains(key_for(request_.key(), &key));
      return reply(here ? LmCode::kSuccess : LmCode::kFail, 0, {});
    }
    case LmCommand::kList:
      return list();
    case LmCommand::kHealth:
      return reply(LmCode::kSuccess, 0, {});
  }
  spoken_ = false;
  broken_ = true;
  ++totals_.broken;
}

// What arrives at a time may take a quarter of the arena, so that clients that send nothing hold no
// more.
void LmSession::begin_value(Time now) {
  if (request_.length < 0) {
    broken_ = true;
    ++totals_.broken;
    return;
  }
  ++totals_.puts;
  in_value_ = true;
  expected_ = static_cast<size_t>(request_.length);
  arrived_ = 0;
  turn_bytes_ = expected_;
  const size_t size = kLmKey + expected_;
  if (totals_.arriving == 0 || totals_.arriving + size <= arena_.capacity() / 4) {
    incoming_ = arena_.take(size, now);
  }
  if (incoming_ != nullptr) {
    totals_.arriving += size;
    std::memcpy(incoming_->bytes().data(), request_.key_bytes.data(), kLmKey);
  } else {
    ++totals_.dropped;
  }
  if (expected_ == 0) keep_value();
}

void LmSession::end_value() {
  if (incoming_ != nullptr) totals_.arriving -= incoming_->bytes().size();
  incoming_.reset();
  in_value_ = false;
}

void LmSession::keep_value() {
  if (incoming_ != nullptr) {
    const Tag tag{request_.meta, sum_of(incoming_->bytes().subspan(kLmKey))};
    tiers::TierKey key;
    arena_.publish(key_for(request_.key(), &key), incoming_, pack(tag));
  }
  end_value();
  ++turn_;
  turn_bytes_ = 0;
}

void LmSession::reply(LmCode code, int32_t length, const LmMeta& meta) {
  head_ = encode_lm_reply(code, length, meta);
  head_left_ = head_.size();
  turn_bytes_ = body_.size();
}

void LmSession::get() {
  ++totals_.gets;
  tiers::TierKey key;
  const BlockArena::Found found = arena_.find(key_for(request_.key(), &key));
  const std::optional<Tag> tag = unpack(found.tag());
  if (found.space == nullptr || !tag.has_value()) return reply(LmCode::kFail, 0, {});
  const auto value = std::span<const std::byte>(found.space->bytes()).subspan(kLmKey);
  if (sum_of(value) != tag->sum) {
    ++totals_.corrupt;
    return reply(LmCode::kFail, 0, {});
  }
  ++totals_.hits;
  outgoing_ = found.space;
  body_ = value;
  reply(LmCode::kSuccess, static_cast<int32_t>(value.size()), tag->meta);
}

// Keys, a line for each, of those that were used last.
void LmSession::list() {
  text_.clear();
  arena_.each_from_the_newest([&](const BlockArena::Found& block) {
    if (!unpack(block.tag()).has_value()) return true;
    const std::string_view padded(reinterpret_cast<const char*>(block.space->bytes().data()),
                                  kLmKey);
    const size_t last = padded.find_last_not_of(' ');
    if (text_.size() + kLmKey + 1 > kListBytes) return false;
    if (!text_.empty()) text_ += '\n';
    text_ += padded.substr(0, last == std::string_view::npos ? 0 : last + 1);
    return true;
  });
  body_ = std::as_bytes(std::span(text_));
  reply(LmCode::kSuccess, static_cast<int32_t>(text_.size()), {});
}

std::span<const std::byte> LmSession::to_send() const {
  if (head_left_ > 0) return std::span(head_).last(head_left_);
  return body_;
}

void LmSession::sent(size_t bytes) {
  if (head_left_ > 0) {
    head_left_ -= bytes;
  } else {
    body_ = body_.subspan(bytes);
  }
  if (head_left_ > 0 || !body_.empty()) return;
  outgoing_.reset();
  text_ = {};
  ++turn_;
}

Time LmSession::allowance() const {
  return kPatience + std::chrono::seconds(turn_bytes_ / kSlowest);
}

}  // namespace baton::kvtransfer::store
