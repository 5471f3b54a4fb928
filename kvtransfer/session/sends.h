// Prefill's end, which has the KV: tells readers which blocks are ready, with their checksums, or
// writes them into blocks that a reader has named. Blocks stay until they were read or their lease
// is over.
//
// Messages are JSON objects. From decode: want (also a sign of life; answered by alive), done. To
// decode: layout, ready, wrote, alive, gone; and over, the last word to a reader that asked for the
// request or is written to: nothing of it moves any more, and why not all has come, or a payload.
// A reader that asked has a lease of its own: when it is over, its blocks are the engine's again.
//
// Messages are not lost while both agents are there, but one may overtake another: ready is
// numbered, a last word says how many writes come, and gone without a reason is no last word to a
// reader that was served. A reader is gone when its agent says so, and never comes back as the
// same: what it was told before it may not have heard.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/kv_mover.h"
#include "transport/clock.h"

namespace baton::kvtransfer::session {

class Sends {
 public:
  // `core` must outlive this object.
  Sends(const Core& core, Time lease, Time max_lease)
      : core_(core), lease_(lease), max_lease_(max_lease) {}

  // --- the engine's thread: see KvSession
  uint64_t open(absl::string_view transfer, size_t tokens);
  void computed(uint64_t number, uint32_t layer, uint64_t first_block, size_t tokens,
                absl::Span<const uint32_t> blocks);
  void restart(uint64_t number);
  void hold(uint64_t number);
  void drop(uint64_t number);
  void fail(uint64_t number, const absl::Status& why);
  std::optional<KvAsked> next_asked();
  void refuse(absl::string_view transfer, const absl::Status& why);
  bool is_wanted(uint64_t number);
  void expect(uint64_t number, uint32_t loads, Time lease);
  void give(uint64_t number, std::string payload);
  std::vector<uint64_t> released();
  std::optional<uint64_t> next_released();
  uint64_t bytes_written();
  uint64_t failed();  // readers that were not served to the end

  // --- the session's
  // Ends open writes, where the agent outlives the session.
  void stop();
  // Call it when the agent is closed: releases all blocks that are held.
  void close();
  // Takes a want or a done of `sender`. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message);
  // Copies computed blocks, at most some megabytes a call, and ends what is over. True: anything is
  // under way.
  bool step();
  // There is more to copy at once.
  bool more() const { return more_; }

 private:
  using Reader = std::shared_ptr<const KvMover::Reader>;
  // A decode worker, for as long as its agent is there.
  struct Met {
    absl::StatusOr<Reader> reader;  // an error: it is refused
    int64_t life = 0;               // of what it knows of us
    uint64_t since = 0;             // the first number of a reading of this life
  };
  // A reader of a transfer.
  struct Reading {
    std::string who;      // its agent
    uint64_t number = 0;  // no other reading has it
    uint64_t load = 0;    // decode's number of the load
    uint64_t said = 0;    // messages of what is ready
    Reader reader;
    std::shared_ptr<const nlohmann::json> want;
    std::shared_ptr<KvMover::Outgoing> shown;      // null: the engine has not opened the transfer
    std::vector<size_t> told;                      // of each row: how many blocks it knows
    std::vector<KvMover::Outgoing::Write> writes;  // under way
    Time expires{};                                // of one that hears
    bool hears = false;                            // how it ends
    bool push = false;                             // it is written to
    bool gone = false;                             // its agent
    bool ended = false;                            // nothing is read or written for it any more
    bool told_end = false;                         // or there is no agent to be told
    absl::Status why;      // it will not be served to the end, or decode has given it up
    size_t written = 0;    // messages that come with its writes
    uint64_t request = 0;  // decode's number for it
    bool wants() const { return !ended && !gone && why.ok(); }
    bool finished() const { return ended && !gone && why.ok(); }
  };
  struct Send {
    std::string transfer;
    uint64_t number = 0;                  // the engine's; 0: decode asked before the request came
    std::unique_ptr<KvMover::Kept> kept;  // null: likewise, or it was refused
    std::optional<KvAsked> asked;         // for the engine
    std::vector<int32_t> prompt;          // as the first who asked has it
    size_t tokens = 0;                    // as it was opened with
    bool held = false;                    // the request has ended
    absl::Status outcome;                 // then
    std::string payload;
    bool dropped = false;     // ... and nothing may be read any more
    bool released = false;    // the engine has its blocks back
    bool refused = false;     // two requests have its name: whose KV it is cannot be told
    bool converting = false;  // the session reads the blocks, without the lock
    bool wanted = true;
    bool shared_out = false;  // one load asked for it, whose readers are its ranks: all or none
    std::vector<Reading> readings;
    size_t needed = 0;  // how many readers come, as they say, or the engine
    Time until{};       // when they have to have come; 0: it does not say
    Time expires{};
  };
  using Message = std::pair<std::string, nlohmann::json>;  // its reader first

  // To a load of decode's, by its number there: a transfer may be loaded again, and one word must
  // not be taken for another's.
  static nlohmann::json word(const char* kind, const std::string& transfer, uint64_t load);
  // There is nothing to read, or no longer.
  static nlohmann::json gone(const std::string& transfer, uint64_t load,
                             const absl::Status& why = {});
  absl::StatusOr<Reader> meet(const std::string& sender, const nlohmann::json& message);
  void wanted(const std::string& sender, const nlohmann::json& message);
  Send& entry(const std::string& transfer);
  void refuse(std::unique_lock<std::mutex>& lock, Send& send);
  Reading* find(Send& send, const std::string& sender, uint64_t load);
  bool is_shown(Send& send, const std::string& sender, const Reader& reader,
                const nlohmann::json& message);
  absl::Status join(Send& send, const std::string& sender, const nlohmann::json& message);
  static bool is_given_up(const Send& send);
  bool may_still_come(const Send& send) const;
  bool wants_more(const Send& send) const;
  bool serve(std::unique_lock<std::mutex>& lock, Send& send, std::vector<Message>* messages);
  bool work(std::unique_lock<std::mutex>& lock, Send& send, KvMover::Outgoing& shown);
  void tell_ready(const Send& send, Reading& reading, std::vector<Message>* messages) const;
  void look_who_went(Time now);
  nlohmann::json lost(const std::string& reader, const nlohmann::json& message) const;
  void forget(const std::string& reader);
  void follow_writes(const Send& send, Reading& reading);
  void end_reading(const Send& send, Reading& reading, Time now, std::vector<Message>* messages);
  size_t count_readers(const nlohmann::json& message) const;
  bool is_read(const Send& send) const;
  void release_blocks(Send& send);
  void wait_for_converting(std::unique_lock<std::mutex>& lock, const Send& send);
  void say(const std::string& reader, nlohmann::json message);
  bool deliver();

  const Core& core_;
  const Time lease_;
  const Time max_lease_;  // granted to one that asks for it
  std::mutex mutex_;
  std::condition_variable converted_;
  std::map<std::string, std::shared_ptr<Send>> sends_;  // by transfer
  absl::flat_hash_map<uint64_t, std::shared_ptr<Send>> numbers_;
  std::vector<uint64_t> released_;
  std::deque<std::string> asked_;  // transfers that decode wants to be computed
  size_t awaited_ = 0;  // transfers that were asked for, and that the engine has not opened
  uint64_t bytes_written_ = 0;
  uint64_t failed_ = 0;
  bool closed_ = false;
  uint64_t next_number_ = 1;
  // The session's alone:
  std::map<std::string, Met> readers_;
  uint64_t next_reading_ = 1;
  Time looked_{};
  std::map<std::string, std::deque<nlohmann::json>> unsaid_;  // to readers that take nothing now
  size_t turn_bytes_ = 0;
  bool more_ = false;
};

}  // namespace baton::kvtransfer::session
