// The decode side of a hand-off: which blocks of prefill's are ready, reads of them, and what they
// hold.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/handoff/block_converter.h"
#include "engine/handoff/loads.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::AgentTransferState;
using kvtransfer::KvLoad;
using nlohmann::json;

constexpr size_t kBatch = 256;  // blocks of one read, and bytes
constexpr size_t kBatchBytes = 16 << 20;

}  // namespace

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
      return absl::InvalidArgumentError(
          absl::StrCat("prefill reports that row ", row, " is ready"));
    }
    std::vector<bool>& asked_for = load.asked_for[row];
    for (const json& block : part.at(2)) {
      const size_t at = number++;
      if (at < first_wanted || at - first_wanted >= asked_for.size()) continue;
      const auto theirs = block.at(0).get<uint64_t>();
      if (theirs >= peer.counts[row]) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill has no block ", theirs, ", but reports it as ready"));
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

}  // namespace baton::engine::handoff
