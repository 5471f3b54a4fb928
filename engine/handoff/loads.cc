// The decode side of a hand-off.
#include "engine/handoff/loads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/block_converter.h"
#include "transport/base/log.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::AgentTransferState;
using kvtransfer::KvLoad;
using kvtransfer::KvRequestId;
using nlohmann::json;
using serve::RemotePrefill;

constexpr Time kAsk = std::chrono::milliseconds(250);  // how often prefill is asked, at most
constexpr Time kDeclineTimeout = std::chrono::seconds(10);
constexpr size_t kBatch = 256;  // blocks of one read, and bytes
constexpr size_t kBatchBytes = 16 << 20;

double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

// --- the engine's thread

absl::Status Loads::start(const RemotePrefill& from, KvLoad load) {
  const std::lock_guard lock(mutex_);
  views_[load.id] = {};
  orders_.push_back({from, std::move(load)});
  core_.wake_thread();
  return absl::OkStatus();
}

void Loads::decline(const RemotePrefill& from) {
  const std::lock_guard lock(mutex_);
  orders_.push_back({from, std::nullopt});
  core_.wake_thread();
}

uint32_t Loads::layers_loaded(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? 0 : it->second.layers;
}

absl::Status Loads::status(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? absl::NotFoundError("there is no such load") : it->second.status;
}

bool Loads::is_exact(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it != views_.end() && it->second.exact;
}

bool Loads::end(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  if (it == views_.end()) return true;
  if (it->second.over) {
    views_.erase(it);
    return true;
  }
  it->second.unwanted = true;
  core_.wake_thread();
  return false;
}

// --- the service's thread

void Loads::heard(const std::string& sender, const json& message) {
  const auto known = peers_.find(sender);
  if (known == peers_.end()) return;
  if (message.at("kind") == "layout") {
    Peer& peer = *known->second;
    if (absl::Status status = learn(sender, peer, message); !status.ok()) {
      peer.refused = absl::StrCat("prefill ", sender, ": ", status.message());
    }
    return;
  }
  const std::string transfer = message.at("transfer").get<std::string>();
  for (Load& load : loads_) {
    if (load.from.transfer != transfer || load.agent != sender || !load.why.ok()) continue;
    load.heard = core_.clock->now();
    if (message.at("kind") == "gone") {
      load.why = absl::NotFoundError("prefill does not have it any more");
    } else if (message.at("kind") == "ready") {
      load.unknown.push_back(message.at("parts"));
    }
  }
}

// How prefill's blocks lie. What they are, if not ours, is the status.
absl::Status Loads::learn(const std::string& sender, Peer& peer, const json& message) {
  if (peer.layout.has_value()) return absl::OkStatus();  // loads go by what it said before
  if (const json& refused = member(message, "refused"); refused.is_string()) {
    return absl::FailedPreconditionError(refused.get<std::string>());
  }
  absl::StatusOr<ForeignLayout> layout = core_.layout_in(message);
  if (!layout.ok()) return layout.status();
  if (core_.staging->pieces(layout->bytes) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a block of its cache has ", layout->bytes,
                                                     " bytes: use more --kv-staging-mib"));
  }
  std::vector<kvtransfer::StridedDescriptor> rows;
  peer.starts.clear();
  peer.counts.clear();
  uint64_t start = 0;
  for (const json& row : message.at("rows")) {
    rows.push_back({.address = row.at(0).get<uint64_t>(),
                    .bytes = row.at(1).get<uint64_t>(),
                    .device = row.at(2).get<uint64_t>(),
                    .stride = row.at(3).get<uint64_t>(),
                    .count = row.at(4).get<uint64_t>()});
    if (rows.back().bytes != layout->bytes) {
      return absl::FailedPreconditionError("its rows are not of the layout that it says");
    }
    peer.starts.push_back(start);
    peer.counts.push_back(rows.back().count);
    start += rows.back().count;
  }
  if (rows.size() != layout->layers.size()) {
    return absl::FailedPreconditionError("it has more or fewer rows than layers");
  }
  const auto list = core_.agent->prepare_remote(sender, absl::MakeConstSpan(std::as_const(rows)));
  if (!list.ok()) return list.status();
  peer.blocks = *list;
  // Values are rounded where the types differ, so only one's own type is exact.
  peer.exact = member(message, "fingerprint") == core_.fingerprint &&
               layout->dtype == ForeignDtype::kBfloat16;
  peer.layout = *std::move(layout);
  return absl::OkStatus();
}

bool Loads::step() {
  std::deque<Order> orders;
  {
    const std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  const Time now = core_.clock->now();
  for (Order& order : orders) {
    Load& load = loads_.emplace_back();
    load.agent = absl::StrCat(order.from.agent, "/0");  // as workers of an engine are numbered
    load.from = std::move(order.from);
    load.wanted = std::move(order.load);
    load.started = load.heard = now;
  }
  for (Load& load : loads_) move(load);
  std::erase_if(loads_, [this](Load& load) { return end_if_over(load); });
  return !loads_.empty();
}

void Loads::move(Load& load) {
  const Time now = core_.clock->now();
  if (load.wanted.has_value() && load.why.ok()) {
    const std::lock_guard lock(mutex_);
    if (views_[load.wanted->id].unwanted) load.why = absl::CancelledError("it is not wanted");
  }
  const Time timeout = load.wanted.has_value() ? load.wanted->timeout : patient(kDeclineTimeout);
  const Time silence = load.wanted.has_value() ? load.wanted->silence : Time{};
  if (load.why.ok()) {
    if (now - load.started >= timeout) {
      load.why =
          absl::DeadlineExceededError(absl::StrCat("not complete after ", seconds(timeout), " s"));
    } else if (silence > Time{} && now - load.heard >= silence) {
      load.why = absl::UnavailableError(
          absl::StrCat("prefill ", load.agent, " is silent for ", seconds(silence), " s"));
    } else if (!load.asked.has_value() || now - *load.asked >= kAsk) {
      ask(load, now);
    }
  }
  const auto known = peers_.find(load.agent);
  const std::shared_ptr<const Peer> peer = known == peers_.end() ? nullptr : known->second;
  if (load.why.ok() && peer != nullptr && !peer->refused.empty()) {
    load.why = absl::FailedPreconditionError(peer->refused);
  }
  if (load.why.ok() && load.peer != nullptr && load.peer != peer) {
    load.why = absl::UnavailableError(absl::StrCat("prefill ", load.agent, " is gone"));
  }
  if (load.why.ok() && load.wanted.has_value() && peer != nullptr && peer->layout.has_value()) {
    if (load.peer == nullptr) begin_parts(load, peer);
    for (const json& parts : std::exchange(load.unknown, {})) {
      try {
        load.why.Update(take_ready(load, parts));
      } catch (const json::exception& error) {
        load.why = absl::InvalidArgumentError(
            absl::StrCat("what prefill says is not understood: ", error.what()));
      }
    }
    if (load.why.ok()) load.why = read(load);
  }
  follow_reads(load);
}

// Asks prefill, which is a sign of life too, or first how to reach it.
void Loads::ask(Load& load, Time now) {
  std::shared_ptr<Peer>& peer = peers_[load.agent];
  if (peer == nullptr) peer = std::make_shared<Peer>();
  if (!core_.agent->has_remote(load.agent)) {
    if (peer->told || peer->layout.has_value()) {  // it went, and may have come back
      core_.agent->remove_remote(load.agent);
      peer = std::make_shared<Peer>();
      if (load.asked.has_value()) {
        load.why = absl::UnavailableError(absl::StrCat("prefill ", load.agent, " is gone"));
        return;
      }
    }
    if (!peer->fetched.has_value() || now - *peer->fetched >= kAsk) {
      peer->fetched = now;
      core_.agent->fetch_metadata(load.agent, load.from.address).IgnoreError();
    }
    return;
  }
  load.asked = now;
  if (!load.wanted.has_value()) return;
  const absl::StatusOr<std::string> metadata = core_.agent->partial_metadata({}, true);
  if (!metadata.ok()) return;
  tell(load, {{"kind", "want"},
              {"first", !peer->told},
              {"sure", load.from.finished},
              {"metadata", absl::BytesToHexString(*metadata)},
              {"identity", core_.model},
              {"model", core_.model},
              {"fingerprint", core_.fingerprint},
              {"kv", core_.own.say()}});
  peer->told = true;
}

void Loads::tell(const Load& load, json message) {
  message["transfer"] = load.from.transfer;
  core_.tell(load.agent, message);  // silence ends what waits for an answer
}

// What of prefill's blocks is wanted: those with tokens of the load.
void Loads::begin_parts(Load& load, std::shared_ptr<const Peer> peer) {
  const ForeignLayout& layout = *peer->layout;
  load.peer = std::move(peer);
  const size_t first = load.wanted->first_token / layout.block_tokens;
  const size_t end = (load.wanted->tokens.size() - 1) / layout.block_tokens + 1;
  load.asked_for.assign(layout.layers.size(), std::vector<bool>(end - first));
  load.missing.assign(layout.layers.size(), end - first);
}

absl::Status Loads::take_ready(Load& load, const json& parts) {
  const Peer& peer = *load.peer;
  const size_t first_wanted = load.wanted->first_token / peer.layout->block_tokens;
  for (const json& part : parts) {
    const auto row = part.at(0).get<size_t>();
    auto number = part.at(1).get<size_t>();
    if (row >= load.asked_for.size()) {
      return absl::InvalidArgumentError(absl::StrCat("prefill says that row ", row, " is ready"));
    }
    std::vector<bool>& asked_for = load.asked_for[row];
    for (const json& block : part.at(2)) {
      const size_t at = number++;
      if (at < first_wanted || at - first_wanted >= asked_for.size()) continue;
      const auto theirs = block.at(0).get<uint64_t>();
      if (theirs >= peer.counts[row]) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill has no block ", theirs, ", and says that it is ready"));
      }
      if (asked_for[at - first_wanted]) continue;
      asked_for[at - first_wanted] = true;
      load.waiting.push_back({.row = row,
                              .number = at,
                              .block = static_cast<uint32_t>(theirs),
                              .checksum = block.at(1).get<uint32_t>()});
    }
  }
  return absl::OkStatus();
}

// Reads what is ready, as far as there is room.
absl::Status Loads::read(Load& load) {
  const Peer& peer = *load.peer;
  const size_t size = peer.layout->bytes;
  const size_t most = std::clamp<size_t>(kBatchBytes / size, 1, kBatch);
  while (!load.waiting.empty()) {
    Read read{.transfer = {}, .piece_bytes = size, .parts = {}};
    std::vector<int64_t> mine, theirs;
    for (Part& part : load.waiting) {
      if (read.parts.size() == most) break;
      const std::optional<uint32_t> piece = core_.staging->allocate(size);
      if (!piece.has_value()) break;
      part.piece = *piece;
      mine.push_back(*piece);
      theirs.push_back(static_cast<int64_t>(peer.starts[part.row] + part.block));
      read.parts.push_back(part);
    }
    if (read.parts.empty()) return absl::OkStatus();  // later
    load.waiting.erase(load.waiting.begin(),
                       load.waiting.begin() + static_cast<ptrdiff_t>(read.parts.size()));
    if (!local_.contains(size)) {
      const kvtransfer::StridedDescriptor row{
          .address = reinterpret_cast<uint64_t>(core_.staging->base()),
          .bytes = size,
          .device = 0,
          .stride = size,
          .count = core_.staging->pieces(size)};
      const auto list = core_.agent->prepare_local(absl::MakeConstSpan(&row, 1));
      if (list.ok()) local_[size] = *list;
    }
    const auto transfer =
        core_.agent->make_transfer(Op::kRead, local_[size], mine, peer.blocks, theirs);
    absl::Status status = transfer.status();
    if (transfer.ok()) status = core_.agent->post(*transfer);
    if (!status.ok()) {
      if (transfer.ok()) core_.agent->abandon(*transfer);
      release(read);
      return status;
    }
    read.transfer = *transfer;
    load.reads.push_back(std::move(read));
  }
  return absl::OkStatus();
}

void Loads::release(const Read& read) {
  for (const Part& part : read.parts) core_.staging->release(read.piece_bytes, part.piece);
}

void Loads::follow_reads(Load& load) {
  std::erase_if(load.reads, [&](Read& read) {
    if (!load.why.ok()) core_.agent->abort(read.transfer).IgnoreError();
    const absl::StatusOr<AgentTransferState> state = core_.agent->state(read.transfer);
    if (state.ok() && *state == AgentTransferState::kRunning) return false;
    const bool done = state.ok() && *state == AgentTransferState::kDone;
    if (!done && load.why.ok()) {
      load.why = state.ok() ? core_.agent->status(read.transfer) : state.status();
    }
    core_.agent->release(read.transfer).IgnoreError();
    if (load.why.ok()) load.heard = core_.clock->now();
    for (const Part& part : read.parts) {
      if (load.why.ok()) load.why = take(load, part);
    }
    release(read);
    return true;
  });
}

// A block is here: checks it, and converts it.
absl::Status Loads::take(Load& load, const Part& part) {
  const ForeignLayout& layout = *load.peer->layout;
  const std::byte* const block = core_.staging->piece(layout.bytes, part.piece);
  if (block_checksum(block, layout.bytes) != part.checksum) {
    return absl::DataLossError(
        absl::StrCat("block ", part.number, " of row ", part.row, " has a wrong checksum"));
  }
  const KvLoad& wanted = *load.wanted;
  const uint32_t layer = layout.layers[part.row];
  read_block(layout, block, part.number, *core_.cache, static_cast<int>(layer),
             {.begin = wanted.first_token,
              .end = wanted.tokens.size(),
              .first_block = wanted.first_token / kBlockTokens,
              .blocks = wanted.blocks});
  if (--load.missing[layer] > 0) return absl::OkStatus();
  const auto here = std::find_if(load.missing.begin(), load.missing.end(),
                                 [](size_t missing) { return missing > 0; });
  const std::lock_guard lock(mutex_);
  View& view = views_[wanted.id];
  view.layers = static_cast<uint32_t>(here - load.missing.begin());
  view.exact = load.peer->exact;
  core_.wake_engine();
  return absl::OkStatus();
}

bool Loads::complete(const Load& load) const {
  if (!load.wanted.has_value()) return load.asked.has_value();
  return load.peer != nullptr && std::all_of(load.missing.begin(), load.missing.end(),
                                             [](size_t missing) { return missing == 0; });
}

bool Loads::end_if_over(Load& load) {
  if (!load.reads.empty() || (load.why.ok() && !complete(load))) return false;
  tell(load, json::object({{"kind", "done"}}));
  if (!load.wanted.has_value()) return true;
  const std::lock_guard lock(mutex_);
  View& view = views_[load.wanted->id];
  view.status = load.why;
  view.over = true;
  core_.wake_engine();
  return true;
}

}  // namespace baton::engine::handoff
