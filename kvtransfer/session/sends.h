// The end that has the KV: shows readers which blocks are ready, with their checksums, and keeps
// them until they were read or their lease is over. Nothing is written into another engine.
//
// Messages are JSON objects. From decode: want (also a sign of life; answered by alive), done. To
// decode: layout, ready, alive, gone. They are those of python/baton/hand_off/prefill.py.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/kv_mover.h"
#include "transport/clock.h"

namespace baton::kvtransfer::session {

class Sends {
 public:
  // `core` must outlive this object.
  Sends(const Core& core, Time lease) : core_(core), lease_(lease) {}

  // --- the engine's thread: see KvSession
  uint64_t open(absl::string_view transfer, size_t tokens);
  void computed(uint64_t number, uint32_t layer, uint64_t first_block, size_t tokens,
                absl::Span<const uint32_t> blocks);
  void restart(uint64_t number);
  void hold(uint64_t number);
  void drop(uint64_t number);
  std::vector<uint64_t> released();
  std::optional<uint64_t> next_released();

  // --- the session's
  // When the agent is closed: what is held is free.
  void close();
  // A want or a done of `sender`'s. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message);
  // Copies what is computed, as far as that is quickly done, and ends what is over. Whether
  // anything is under way.
  bool step();
  // There is more to copy at once.
  bool more() const { return more_; }

 private:
  using Reader = std::shared_ptr<const KvMover::Reader>;  // null: it is refused, and knows why
  // A reader that has not read all of a transfer yet.
  struct Reading {
    std::string who;  // its agent
    Reader reader;
    std::shared_ptr<KvMover::Outgoing> shown;  // null: the engine has not opened the transfer
    std::vector<size_t> told;                  // of each row: how many blocks it knows
  };
  struct Send {
    std::string transfer;
    uint64_t number = 0;                  // the engine's; 0: decode asked before the request came
    std::unique_ptr<KvMover::Kept> kept;  // null: likewise, or it was refused
    bool held = false;                    // the request has ended
    bool dropped = false;                 // ... and nothing may be read any more
    bool released = false;                // the engine has its blocks back
    bool refused = false;     // two requests have its name: whose KV it is cannot be told
    bool converting = false;  // the session reads the blocks, without the lock
    std::vector<Reading> readings;
    std::set<std::string> done;  // readers that have all they wanted
    size_t needed = 0;           // how many these have to be, as they say
    Time expires{};
  };
  using Message = std::pair<std::string, nlohmann::json>;  // for whom

  Reader meet(const std::string& sender, const nlohmann::json& message);
  void wanted(const std::string& sender, const nlohmann::json& message);
  Send& entry(const std::string& transfer);
  void refuse(std::unique_lock<std::mutex>& lock, Send& send);
  bool is_shown(Send& send, const std::string& sender, const Reader& reader);
  bool serve(std::unique_lock<std::mutex>& lock, Send& send, std::vector<Message>* messages);
  bool work(std::unique_lock<std::mutex>& lock, Send& send, KvMover::Outgoing& shown);
  void tell_ready(const Send& send, Reading& reading, std::vector<Message>* messages) const;
  void tell_again(const Message& message);
  size_t count_readers(uint32_t ranks) const;
  bool is_read(Send& send) const;
  void release_blocks(Send& send);
  void wait_for_converting(std::unique_lock<std::mutex>& lock, const Send& send);
  bool deliver(const std::vector<Message>& messages);

  const Core& core_;
  const Time lease_;
  std::mutex mutex_;
  std::condition_variable converted_;
  std::map<std::string, std::shared_ptr<Send>> sends_;  // by transfer
  absl::flat_hash_map<uint64_t, std::shared_ptr<Send>> numbers_;
  std::vector<uint64_t> released_;
  size_t awaited_ = 0;  // transfers that were asked for, and that the engine has not opened
  bool closed_ = false;
  uint64_t next_number_ = 1;
  // The session's alone:
  std::map<std::string, Reader> readers_;
  std::vector<Message> unsaid_;  // of transfers that are gone, to readers that take nothing now
  size_t turn_bytes_ = 0;
  bool more_ = false;
};

}  // namespace baton::kvtransfer::session
