// The end that has the KV: converts blocks as they are computed into the layout of the reader that
// requested them, says which are ready, with their checksums, and keeps them until they were read
// or their lease is over. Nothing is written into another engine.
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
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/handoff/core.h"
#include "transport/clock.h"

namespace baton::engine::handoff {

class Sends {
 public:
  // `core` must outlive this object.
  Sends(const Core& core, Time lease) : core_(core), lease_(lease) {}

  // --- the engine's thread: see HandOff
  uint64_t open(absl::string_view transfer, size_t tokens);
  void computed(uint64_t number, uint32_t layer, size_t tokens, absl::Span<const uint32_t> blocks);
  void restart(uint64_t number);
  void hold(uint64_t number);
  void drop(uint64_t number);
  std::vector<uint64_t> released();

  // --- the service's
  // When the agent is closed: what is held is free.
  void close();
  // A want or a done of `sender`'s. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message);
  // Converts what is ready, as far as that is quickly done, and ends what is over. Whether anything
  // is under way.
  bool step();
  // There is more to convert at once.
  bool more() const { return more_; }

 private:
  using Layout = std::shared_ptr<const ForeignLayout>;
  // What a reader has been told of us.
  struct Reader {
    Layout layout;    // of its cache; null: refused
    std::string why;  // it was refused
  };
  struct Send {
    std::string transfer;
    uint64_t number = 0;           // the engine's; 0: decode asked before the request came
    size_t tokens = 0;             // of the prompt
    std::vector<uint32_t> blocks;  // the engine's
    std::vector<size_t> computed;  // of each layer: tokens whose KV is in them
    bool held = false;             // the request has ended
    bool dropped = false;          // ... and nothing may be read any more
    bool released = false;         // the engine has its blocks back
    bool refused = false;          // two requests have its name: whose KV it is nobody can tell
    bool converting = false;       // the service reads the blocks, without the lock
    bool read = false;             // the reader has all it wanted
    std::string reader;            // the agent that requested it
    Layout layout;                 // of its cache
    std::vector<uint32_t> pieces;  // of the staging memory: a block of all layers each
    std::vector<std::vector<uint32_t>> checksums;  // of each row of the layout: of its first blocks
    std::vector<size_t> told;                      // of each row: how many the reader knows
    Time expires{};
  };
  using Message = std::pair<std::string, nlohmann::json>;  // for whom

  absl::StatusOr<Layout> layout_of(const nlohmann::json& message) const;
  nlohmann::json layout_message(const Reader& reader, const nlohmann::json& asked) const;
  Reader& meet(const std::string& sender, const nlohmann::json& message);
  void wanted(const std::string& sender, const nlohmann::json& message);
  Send& entry(const std::string& transfer);
  void refuse(std::unique_lock<std::mutex>& lock, Send& send);
  void assign(Send& send, const std::string& sender, const Layout& layout);
  bool make_room(Send& send) const;
  bool too_long(const Send& send) const;
  bool convert(std::unique_lock<std::mutex>& lock, Send& send);
  uint32_t convert_block(std::unique_lock<std::mutex>& lock, Send& send, size_t row, size_t number);
  void tell_ready(Send& send, std::vector<Message>* messages) const;
  void tell_again(const Message& message);
  size_t ready_blocks(const Send& send, size_t row) const;
  bool staged(const Send& send) const;
  void release_pieces(Send& send) const;
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
  // The service's alone:
  std::map<std::string, Reader> readers_;
  std::vector<Message> unsaid_;  // of transfers that are gone, to readers that take nothing now
  size_t turn_bytes_ = 0;
  bool more_ = false;
};

}  // namespace baton::engine::handoff
