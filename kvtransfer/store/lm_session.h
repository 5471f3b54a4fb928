// One client of the `lm://` wire, without its socket: bytes in, bytes out.
//
//   while (session.wants_bytes()) { n = recv(fd, session.room()); session.filled(n); }
//   while (!session.to_send().empty()) session.sent(send(fd, session.to_send()));
//
// A value comes straight into the arena and leaves from there. What there is no room for is read
// and thrown away, for a PUT has no reply; a client cannot tell that from an eviction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "kvtransfer/store/block_arena.h"
#include "kvtransfer/store/lm_wire.h"
#include "transport/clock.h"

namespace baton::kvtransfer::store {

// Totals of all sessions of a server; only its thread changes them.
struct LmTotals {
  uint64_t puts = 0;
  uint64_t gets = 0;
  uint64_t hits = 0;
  uint64_t dropped = 0;  // values that there was no room for
  uint64_t corrupt = 0;  // values that were not what was put any more: not given out
  uint64_t broken = 0;   // connections that broke the protocol
  size_t arriving = 0;   // bytes of values that are on their way
};

class LmSession {
 public:
  LmSession(BlockArena& arena, LmTotals& totals) : arena_(arena), totals_(totals) {}
  ~LmSession() { end_value(); }
  LmSession(const LmSession&) = delete;
  LmSession& operator=(const LmSession&) = delete;

  // It broke the protocol: close the connection.
  bool broken() const { return broken_; }
  // No request is half here, and no reply half sent.
  bool idle() const { return have_ == 0 && !in_value_ && to_send().empty(); }
  bool has_spoken() const { return spoken_; }  // at least one whole request

  // Requests are taken one at a time: none while a reply is being sent.
  bool wants_bytes() const { return !broken_ && to_send().empty(); }
  std::span<std::byte> room();
  void filled(size_t bytes, Time now);

  std::span<const std::byte> to_send() const;
  void sent(size_t bytes);

  // What it is at: another number for each request, value and reply.
  uint64_t turn() const { return turn_; }
  // How long that may take: a value has longer.
  Time allowance() const;

 private:
  void take_request(Time now);
  void begin_value(Time now);
  void end_value();
  void keep_value();
  void reply(LmCode code, int32_t length, const LmMeta& meta);
  void get();
  void list();

  BlockArena& arena_;
  LmTotals& totals_;
  bool broken_ = false;
  bool spoken_ = false;
  uint64_t turn_ = 0;
  size_t turn_bytes_ = 0;
  std::array<std::byte, kLmRequest> header_{};
  size_t have_ = 0;  // bytes of the header
  LmRequest request_;
  // A value on its way in: into `incoming_`, or nowhere.
  bool in_value_ = false;
  size_t expected_ = 0, arrived_ = 0;
  BlockArena::SpacePtr incoming_;
  // A reply on its way out: the head, then what follows it.
  std::array<std::byte, kLmReply> head_{};
  size_t head_left_ = 0;
  BlockArena::SpacePtr outgoing_;
  std::string text_;
  std::span<const std::byte> body_;
};

}  // namespace baton::kvtransfer::store
