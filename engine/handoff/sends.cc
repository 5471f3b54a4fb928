// The prefill side of a hand-off.
#include "engine/handoff/sends.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/block_converter.h"
#include "transport/base/log.h"

namespace baton::engine::handoff {
namespace {

using nlohmann::json;

constexpr size_t kTurnBytes = 16 << 20;   // converted before messages are looked at again
constexpr size_t kMostAwaited = 1 << 14;  // transfers that were asked for before their request came
constexpr size_t kBlocksAtOnce = 2000;    // told in a message: a slow reader delays longer ones

size_t blocks_of(size_t tokens, const ForeignLayout& layout) {
  return (tokens + layout.block_tokens - 1) / layout.block_tokens;
}

size_t piece_bytes(const ForeignLayout& layout) { return layout.layers.size() * layout.bytes; }

}  // namespace

// --- the engine's thread

uint64_t Sends::open(absl::string_view transfer, size_t tokens) {
  std::unique_lock lock(mutex_);
  if (closed_ || !is_text(std::string(transfer))) return 0;
  Send& send = entry(std::string(transfer));
  if (send.number != 0) {
    const std::shared_ptr<Send> first = sends_[send.transfer];  // kept while the lock is open
    refuse(lock, *first);
    return 0;
  }
  --awaited_;
  send.number = next_number_++;
  send.tokens = tokens;
  send.computed.assign(core_.own.layers.size(), 0);
  numbers_[send.number] = sends_[send.transfer];
  return send.number;
}

// Decode would take the blocks of one request for those of the other: neither has them, and who
// asks hears so until neither of the two can be meant any more.
void Sends::refuse(std::unique_lock<std::mutex>& lock, Send& send) {
  base::log_event(base::LogLevel::kWarning,
                  "two requests have the transfer_id \"%s\": the KV of neither is handed over",
                  send.transfer);
  send.expires = core_.clock->now() + lease_;
  if (std::exchange(send.refused, true)) return;
  numbers_.erase(send.number);
  wait_for_converting(lock, send);
  if (send.held) release_blocks(send);
  core_.wake_thread();
}

void Sends::computed(uint64_t number, uint32_t layer, size_t tokens,
                     absl::Span<const uint32_t> blocks) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  Send& send = *it->second;
  if (send.blocks.size() < blocks.size()) send.blocks.assign(blocks.begin(), blocks.end());
  send.computed[layer] = std::max(send.computed[layer], tokens);
  if (send.layout != nullptr) core_.wake_thread();
}

// What is converted already stays: computed again it is the same.
void Sends::restart(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const std::shared_ptr<Send> send = it->second;
  send->computed.assign(send->computed.size(), 0);
  wait_for_converting(lock, *send);
  send->blocks.clear();
}

void Sends::hold(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) {  // it is over already
    released_.push_back(number);
    core_.wake_engine();
    return;
  }
  it->second->held = true;
  it->second->expires = core_.clock->now() + lease_;
  core_.wake_thread();
}

void Sends::drop(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const std::shared_ptr<Send> send = it->second;
  send->dropped = true;
  wait_for_converting(lock, *send);
  core_.wake_thread();
}

std::vector<uint64_t> Sends::released() {
  const std::lock_guard lock(mutex_);
  return std::exchange(released_, {});
}

void Sends::wait_for_converting(std::unique_lock<std::mutex>& lock, const Send& send) {
  converted_.wait(lock, [&send] { return !send.converting; });
}

// --- the service's thread

void Sends::heard(const std::string& sender, const json& message) {
  if (message.at("kind") == "want") return wanted(sender, message);
  const std::lock_guard lock(mutex_);
  const auto it = sends_.find(message.at("transfer").get<std::string>());
  if (it == sends_.end()) return;
  Send& send = *it->second;
  if (send.reader.empty() || send.reader == sender) send.read = true;  // else another one reads it
}

void Sends::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [transfer, send] : sends_) {
    if (send->held) release_blocks(*send);
  }
  sends_.clear();
  numbers_.clear();
  awaited_ = 0;
}

// Whether blocks can be made for the reader's cache, and how they lie there.
absl::StatusOr<Sends::Layout> Sends::layout_of(const json& message) const {
  absl::StatusOr<ForeignLayout> layout = core_.layout_in(message);
  if (!layout.ok()) return layout.status();
  if (core_.staging->pieces(piece_bytes(*layout)) == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a block of all layers of decode's cache has ", piece_bytes(*layout),
                     " bytes: prefill needs more --kv-staging-mib"));
  }
  return std::make_shared<const ForeignLayout>(*std::move(layout));
}

json Sends::layout_message(const Reader& reader, const json& asked) const {
  json message = {{"kind", "layout"},
                  {"model", core_.model},
                  {"fingerprint", core_.fingerprint},
                  {"rows", json::array()}};
  if (reader.layout == nullptr) {
    message["refused"] = reader.why;
    message["identity"] = reader.why;  // for a reader that compares it with its own, and shows both
    return message;
  }
  // We have found that the KV will be what its engine expects: its own identity says so to it.
  message["identity"] = member(asked, "identity");
  message["kv"] = reader.layout->say();
  const ForeignLayout& layout = *reader.layout;
  const size_t stride = piece_bytes(layout);
  const auto base = reinterpret_cast<uint64_t>(core_.staging->base());
  for (size_t row = 0; row < layout.layers.size(); ++row) {
    message["rows"].push_back(
        {base + row * layout.bytes, layout.bytes, 0, stride, core_.staging->pieces(stride)});
  }
  return message;
}

// Learns how to reach a reader, and how its cache is laid out.
Sends::Reader& Sends::meet(const std::string& sender, const json& message) {
  Reader& reader = readers_[sender];
  reader = {};
  const std::string metadata = message.at("metadata").get<std::string>();
  core_.agent->add_remote(absl::HexStringToBytes(metadata)).status().IgnoreError();
  std::erase_if(readers_, [&](const auto& other) {
    return other.first != sender && !core_.agent->has_remote(other.first);
  });
  {
    // What it was told before, it may not have heard, or another of its name has.
    const std::lock_guard lock(mutex_);
    for (auto& [transfer, send] : sends_) {
      if (send->reader == sender) send->reader.clear();
    }
  }
  absl::StatusOr<Layout> layout = layout_of(message);
  if (layout.ok()) {
    reader.layout = *std::move(layout);
  } else {
    reader.why = std::string(layout.status().message());
    base::log_event(base::LogLevel::kWarning, "cannot hand KV over to %s: %s", sender, reader.why);
  }
  core_.tell(sender, layout_message(reader, message)).IgnoreError();
  return reader;
}

void Sends::wanted(const std::string& sender, const json& message) {
  auto known = readers_.find(sender);
  if (known == readers_.end() || member(message, "first") == true) {
    meet(sender, message);
    known = readers_.find(sender);
  }
  const Reader& reader = known->second;
  if (reader.layout == nullptr) return;  // it knows why
  const std::string transfer = message.at("transfer").get<std::string>();
  bool here = false;
  {
    const std::lock_guard lock(mutex_);
    const auto it = sends_.find(transfer);
    here = it != sends_.end() && !it->second->dropped && !it->second->refused && !it->second->read;
    if (it == sends_.end() && member(message, "sure") != true && awaited_ < kMostAwaited) {
      entry(transfer);  // the request is still on its way to this engine
      here = true;
    }
    if (here) {
      Send& send = *sends_[transfer];
      if (send.reader != sender) assign(send, sender, reader.layout);
      here = send.reader == sender;
      if (here) send.expires = core_.clock->now() + lease_;  // each request renews
    }
  }
  const absl::Status told =
      core_.tell(sender, {{"kind", here ? "alive" : "gone"}, {"transfer", transfer}});
  // It is gone: the lease ends what it has not read. One that takes nothing at present asks again.
  if (!told.ok() && !absl::IsResourceExhausted(told)) readers_.erase(sender);
}

Sends::Send& Sends::entry(const std::string& transfer) {
  std::shared_ptr<Send>& send = sends_[transfer];
  if (send == nullptr) {
    send = std::make_shared<Send>();
    send->transfer = transfer;
    send->expires = core_.clock->now() + lease_;
    ++awaited_;
  }
  return *send;
}

// Another reader than before gets what there was for that one, where its cache is laid out alike;
// else what the engine still has.
void Sends::assign(Send& send, const std::string& sender, const Layout& layout) {
  if (send.layout == nullptr || *send.layout != *layout) {
    if (send.released) return;
    if (send.layout != nullptr) release_pieces(send);
    send.layout = layout;
    send.checksums.assign(layout->layers.size(), {});
  }
  send.told.assign(layout->layers.size(), 0);
  send.reader = sender;
}

// How many blocks of the reader's size are complete in a row of its cache.
size_t Sends::ready_blocks(const Send& send, size_t row) const {
  if (send.number == 0) return 0;
  const size_t tokens = send.computed[send.layout->layers[row]];
  return tokens >= send.tokens ? blocks_of(send.tokens, *send.layout)
                               : tokens / send.layout->block_tokens;
}

// Whether all of the prompt has been converted.
bool Sends::staged(const Send& send) const {
  if (send.layout == nullptr || send.number == 0) return false;
  const size_t blocks = blocks_of(send.tokens, *send.layout);
  return std::all_of(send.checksums.begin(), send.checksums.end(),
                     [blocks](const auto& row) { return row.size() == blocks; });
}

// Converts a block of a row, and gives its checksum. The lock is open while the engine's blocks are
// read: nothing takes them away then.
uint32_t Sends::convert_block(std::unique_lock<std::mutex>& lock, Send& send, size_t row,
                              size_t number) {
  const Layout layout = send.layout;
  const size_t size = piece_bytes(*layout);
  std::byte* const block = core_.staging->piece(size, send.pieces[number]) + row * layout->bytes;
  const size_t first = number * layout->block_tokens / kBlockTokens;
  const size_t end =
      std::min(send.blocks.size(), ((number + 1) * layout->block_tokens - 1) / kBlockTokens + 1);
  const std::vector<uint32_t> blocks(send.blocks.begin() + static_cast<ptrdiff_t>(first),
                                     send.blocks.begin() + static_cast<ptrdiff_t>(end));
  const OwnTokens tokens{.begin = 0, .end = send.tokens, .first_block = first, .blocks = blocks};
  send.converting = true;
  lock.unlock();
  write_block(*layout, block, number, *core_.cache, static_cast<int>(layout->layers[row]), tokens);
  const uint32_t checksum = block_checksum(block, layout->bytes);
  lock.lock();
  send.converting = false;
  converted_.notify_all();
  return checksum;
}

// Takes room for the whole prompt or for nothing of it: two that each had half would wait for each
// other.
bool Sends::make_room(Send& send) const {
  const size_t size = piece_bytes(*send.layout);
  const size_t wanted = blocks_of(send.tokens, *send.layout);
  while (send.pieces.size() < wanted) {
    const std::optional<uint32_t> piece = core_.staging->allocate(size);
    if (!piece.has_value()) {
      release_pieces(send);
      return false;
    }
    send.pieces.push_back(*piece);
  }
  return true;
}

// Whether it will never have room.
bool Sends::too_long(const Send& send) const {
  return blocks_of(send.tokens, *send.layout) > core_.staging->pieces(piece_bytes(*send.layout));
}

// Converts what is ready. False: there is no room at present.
bool Sends::convert(std::unique_lock<std::mutex>& lock, Send& send) {
  if (send.number == 0) return true;
  if (send.pieces.empty() && !make_room(send)) return false;
  for (size_t row = 0; row < send.checksums.size(); ++row) {
    std::vector<uint32_t>& checksums = send.checksums[row];
    while (checksums.size() < ready_blocks(send, row) && !send.dropped && !send.refused) {
      more_ = turn_bytes_ >= kTurnBytes;
      if (more_) return true;
      turn_bytes_ += send.layout->bytes;
      checksums.push_back(convert_block(lock, send, row, checksums.size()));
    }
  }
  return true;
}

void Sends::tell_ready(Send& send, std::vector<Message>* messages) const {
  json parts = json::array();
  size_t room = kBlocksAtOnce;
  const auto say = [&] {
    if (parts.empty()) return;
    messages->emplace_back(send.reader, json{{"kind", "ready"},
                                             {"transfer", send.transfer},
                                             {"parts", std::exchange(parts, json::array())}});
    room = kBlocksAtOnce;
  };
  for (size_t row = 0; row < send.checksums.size(); ++row) {
    const std::vector<uint32_t>& checksums = send.checksums[row];
    while (send.told[row] < checksums.size()) {
      const size_t first = send.told[row];
      const size_t count = std::min(room, checksums.size() - first);
      json blocks = json::array();
      for (size_t number = first; number < first + count; ++number) {
        blocks.push_back({send.pieces[number], checksums[number]});
      }
      parts.push_back({row, first, std::move(blocks)});
      send.told[row] += count;
      room -= count;
      if (room == 0) say();
    }
  }
  say();
}

// It met a queue that is full.
void Sends::tell_again(const Message& message) {
  const std::lock_guard lock(mutex_);
  const auto it = sends_.find(message.second.at("transfer").get<std::string>());
  if (it == sends_.end() || it->second->reader != message.first) return;
  std::vector<size_t>& told = it->second->told;
  for (const json& part : message.second.at("parts")) {
    const auto row = part[0].get<size_t>();
    if (row < told.size()) told[row] = std::min(told[row], part[1].get<size_t>());
  }
}

bool Sends::step() {
  std::vector<Message> messages = std::exchange(unsaid_, {});
  bool busy = false;
  more_ = false;
  turn_bytes_ = 0;
  {
    std::unique_lock lock(mutex_);
    const Time now = core_.clock->now();
    for (auto it = sends_.begin(); it != sends_.end();) {
      Send& send = *it->second;
      if (send.refused && !send.reader.empty()) {
        messages.emplace_back(std::exchange(send.reader, ""),
                              json{{"kind", "gone"}, {"transfer", send.transfer}});
      }
      if (send.refused) release_pieces(send);
      const bool open = send.number != 0 && !send.held && !send.dropped && !send.refused;
      const bool wanted = !send.reader.empty() && !send.read && !send.dropped && !send.refused;
      if (wanted && send.number != 0 && too_long(send)) {
        send.read = true;
        messages.emplace_back(send.reader, json{{"kind", "gone"}, {"transfer", send.transfer}});
        base::log_event(base::LogLevel::kWarning,
                        "cannot hand over the KV of a prompt of %d tokens to %s: it needs %d "
                        "blocks of %d bytes; use more --kv-staging-mib",
                        send.tokens, send.reader, blocks_of(send.tokens, *send.layout),
                        piece_bytes(*send.layout));
      }
      if (wanted && !send.read) {
        busy = !convert(lock, send) || busy;
        tell_ready(send, &messages);
      }
      if (send.held && (staged(send) || send.read)) release_blocks(send);
      const bool over = (send.dropped && !send.refused) ||
                        (send.held && send.read && !send.refused) || (!open && now >= send.expires);
      if (!over) {
        busy = busy || !open;  // its lease is looked at
        ++it;
        continue;
      }
      if (send.dropped && !send.reader.empty()) {
        messages.emplace_back(send.reader, json{{"kind", "gone"}, {"transfer", send.transfer}});
      }
      if (send.held) release_blocks(send);
      release_pieces(send);
      if (send.number == 0) --awaited_;
      numbers_.erase(send.number);
      it = sends_.erase(it);
    }
  }
  return !deliver(messages) || busy;
}

void Sends::release_pieces(Send& send) const {
  for (const uint32_t piece : send.pieces) {
    core_.staging->release(piece_bytes(*send.layout), piece);
  }
  send.pieces.clear();
}

void Sends::release_blocks(Send& send) {
  if (std::exchange(send.released, true)) return;
  released_.push_back(send.number);
  core_.wake_engine();
}

// False: a reader takes nothing at present.
bool Sends::deliver(const std::vector<Message>& messages) {
  bool all = true;
  for (const Message& message : messages) {
    const absl::Status told = core_.tell(message.first, message.second);
    if (told.ok()) continue;
    if (!absl::IsResourceExhausted(told)) {
      readers_.erase(message.first);
      continue;
    }
    all = false;
    if (message.second.at("kind") == "ready") {
      tell_again(message);
    } else {
      unsaid_.push_back(message);
    }
  }
  return all;
}

}  // namespace baton::engine::handoff
