// A numbered stream of which parts may be lost, put in order: which batch is applied when, what is
// asked for again, and when nothing of what was applied holds any more.
//
// vLLM's publisher drops batches for a subscriber that is slow or away, and no message says so: the
// next sequence number is higher. What was lost it gives again, as far as its buffer goes back, to
// who asks for all batches from a number on. Three rules keep what is built of the batches from
// being wrong:
//
// - A batch is applied only right behind the one before it. What comes too early waits for a
// replay.
// - A replay is asked for from the last batch that was applied, and must begin with it, byte for
//   byte (a batch has its time in it). If it begins later the buffer does not reach back so far; if
//   it begins with another batch, or has none, the publisher is another process than before. Either
//   way what was applied is forgotten, and it begins anew with what the replay has.
// - A number that goes back, and a connection that ends, are a publisher that was started anew:
// what
//   was applied is forgotten, and everything that the buffer has is asked for.
//
// A batch lost at the end, behind which nothing comes, is found by check(). Where a replay does not
// come, it is asked for again; in the end what is known begins with what comes live, until check()
// gets one. Without replays everything is forgotten at each gap. No sockets, threads or clocks:
// everything is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"

namespace baton::engine::kv_events {

struct EventOrderCalls {
  // The next batch. InvalidArgument: it makes no sense, and so nothing before it holds.
  std::function<absl::Status(std::string_view payload)> apply;
  // What was applied may be out of date, until known() again; why.
  std::function<void(const std::string& why)> doubt;
  // Nothing that was applied holds; why.
  std::function<void(const std::string& why)> forget;
  // Ask for all batches from this one on. An answer under way to what was asked before has ended,
  // or has to be kept from coming.
  std::function<void(uint64_t from)> ask;
};

struct EventOrderStats {
  uint64_t batches = 0;     // applied
  uint64_t gaps = 0;        // numbers that jumped
  uint64_t replayed = 0;    // batches that only a replay had
  uint64_t restarts = 0;    // of the publisher
  uint64_t forgotten = 0;   // times that what was known was dropped
  uint64_t unanswered = 0;  // replays that did not come, or not to their end
};

class EventOrder {
 public:
  EventOrder(bool has_replay, EventOrderCalls calls)
      : has_replay_(has_replay), calls_(std::move(calls)) {}

  void connected();
  void disconnected();
  void live(uint64_t sequence, std::string payload);
  void replayed(uint64_t sequence, std::string payload);
  void replay_ended();
  // The answer did not come, or not to its end. It is asked for again, three times in all.
  void replay_failed(const std::string& why);
  // It has been quiet for a while: is there something that did not come?
  void check();

  bool replaying() const { return replaying_; }
  // What was applied is all that can be known now: no answer is awaited.
  bool known() const { return connected_ && !replaying_; }
  // For want of a replay it began with what came live: check() is worth a try.
  bool began_in_the_middle() const { return has_replay_ && anywhere_ && last_.has_value(); }
  const EventOrderStats& stats() const { return stats_; }

  static constexpr size_t kMaxHeldBytes = size_t{64} << 20;

 private:
  struct Batch {
    uint64_t sequence = 0;
    std::string payload;
  };
  uint64_t next() const { return last_.has_value() ? last_->sequence + 1 : 0; }
  // Whether this batch may be the next that is applied.
  bool fits(uint64_t sequence) const;
  bool held_fits() const;
  void ask();
  void ask_again();
  void give_up(const std::string& why);
  void forget(const std::string& why);
  void restarted(const std::string& why);
  void apply(uint64_t sequence, std::string payload);
  void hold(uint64_t sequence, std::string payload);
  void drop_held();
  void take_held();

  const bool has_replay_;
  const EventOrderCalls calls_;
  bool connected_ = false;
  bool anywhere_ = false;           // no replay begins it: any batch does, or did
  std::optional<Batch> last_;       // that was applied
  std::optional<uint64_t> newest_;  // that came live
  bool replaying_ = false;
  bool whole_ = false;      // this replay is to begin everything anew
  bool first_ = false;      // batch of this replay is still to come
  bool useless_ = false;    // is the rest of this replay
  bool progress_ = false;   // was made by it
  int fruitless_ = 0;       // replays in a row that made none
  int late_begins_ = 0;     // replays in a row that began behind the last batch
  int failures_ = 0;        // replays in a row that did not come
  int rounds_ = 0;          // replays in a row
  std::deque<Batch> held_;  // came while a replay was under way
  size_t held_bytes_ = 0;
  EventOrderStats stats_;
};

}  // namespace baton::engine::kv_events
