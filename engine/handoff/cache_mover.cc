// Where blocks of this engine lie, and what others are told of them.
#include "engine/handoff/cache_mover.h"

#include <zlib.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::handoff {

using kvtransfer::AgentTransferId;
using kvtransfer::KvRun;
using nlohmann::json;
CacheMover::CacheMover(const KvCache& cache, std::optional<int> device, kvtransfer::KvWorker me,
                       kvtransfer::Agent& agent, Staging& staging, Identity identity,
                       Timeline* timeline)
    : cache_(cache),
      device_(device),
      me_(me),
      own_(ForeignLayout::own(cache.geometry(), me.ranks, me.rank)),
      agent_(agent),
      staging_(staging),
      identity_(std::move(identity)),
      timeline_(timeline) {
  const kvtransfer::Descriptor memory{.address = reinterpret_cast<uint64_t>(cache.base()),
                                      .bytes = cache.geometry().cache_bytes(cache.num_blocks()),
                                      .device = static_cast<uint64_t>(device.value_or(0))};
  kvtransfer::KvLayout layout =
      kvtransfer::KvLayout::transposed_keys({.layers = static_cast<uint32_t>(own_.layers.size()),
                                             .blocks = static_cast<uint32_t>(cache.num_blocks()),
                                             .block_tokens = own_.block_tokens,
                                             .total_heads = me.heads,
                                             .first_head = own_.first_head,
                                             .heads = own_.heads,
                                             .head_size = own_.head_size,
                                             .dtype = own_.dtype});
  layout.model.weights = kOwnWeights;
  auto placed =
      kvtransfer::KvPlacement::of(std::move(layout), absl::MakeConstSpan(&memory, 1), kind());
  if (placed.ok()) direct_ = kvtransfer::session::make_direct_mover(agent, *placed);
}

uint32_t CacheMover::rank_of(const std::string& agent, uint32_t ranks) {
  uint32_t number = 0;
  const bool said = absl::SimpleAtoi(agent.substr(agent.rfind('/') + 1), &number);
  return said && ranks > 0 ? number % ranks : 0;
}

uint32_t CacheMover::block_checksum(const std::byte* block, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const unsigned char*>(block), bytes));
}

absl::StatusOr<ForeignLayout> CacheMover::layout_in(const json& message) const {
  const json& theirs = member(message, "model");
  if (!theirs.is_string()) {
    return absl::FailedPreconditionError(
        "it does not name its model: run the same release of baton.vllm on both sides");
  }
  const auto name = theirs.get<std::string>();
  if (name.empty()) {
    return absl::FailedPreconditionError(
        "it does not identify its checkpoint by its files: give it and --kv-identity the same "
        "name");
  }
  // One that is alone with its like is called by its fingerprint.
  const json& prints = member(message, "fingerprint");
  const bool alike = prints == identity_.fingerprint &&
                     (prints == name || identity_.model == identity_.fingerprint);
  if (name != identity_.model && !alike) {
    // An arithmetic follows a plus sign.
    const auto brief = [](const std::string& of) {
      return of.substr(0, 16) + of.substr(std::min(of.find('+', 1), of.size()));
    };
    return absl::FailedPreconditionError(
        absl::StrCat("it has another model: ", brief(name), ", ours ", brief(identity_.model),
                     ": give both the same checkpoint and --arithmetic"));
  }
  return ForeignLayout::parse(member(message, "kv"));
}

absl::Status CacheMover::place(ForeignLayout& layout, const std::string& peer,
                               uint32_t ranks) const {
  return layout.place(cache_.geometry(), me_.heads, ranks, rank_of(peer, ranks));
}

ForeignLayout CacheMover::ours(KvHeads heads) const {
  KvGeometry geometry = cache_.geometry();
  geometry.kv_heads = static_cast<int>(heads.end - heads.first);
  ForeignLayout layout = ForeignLayout::own(geometry);
  layout.total_heads = me_.heads;
  layout.first_head = heads.first;
  return layout;
}

kvtransfer::StridedDescriptor CacheMover::row(size_t layer, KvHeads heads) const {
  const std::byte* const first = cache_.block(static_cast<int>(layer), 0).data();
  return {
      .address = reinterpret_cast<uint64_t>(first) + (heads.first - own_.first_head) * head_bytes(),
      .bytes = (heads.end - heads.first) * head_bytes(),
      .device = static_cast<uint64_t>(device_.value_or(0)),
      .stride = own_.bytes,
      .count = cache_.num_blocks()};
}

std::optional<uint32_t> CacheMover::checksum(uint64_t address, size_t bytes) const {
  if (device_.has_value()) return std::nullopt;
  return block_checksum(reinterpret_cast<const std::byte*>(address), bytes);
}

absl::Status CacheMover::with_blocks(
    uint32_t layer, absl::Span<const uint32_t> blocks, bool changed,
    absl::FunctionRef<void(const KvCache&, int, absl::Span<const uint32_t>)> use) {
  if (!device_.has_value()) {
    use(cache_, static_cast<int>(layer), blocks);
    return absl::OkStatus();
  }
  const size_t bytes = blocks.size() * own_.bytes;
  const std::optional<uint32_t> piece = staging_.allocate(bytes);
  if (!piece.has_value()) {
    return absl::ResourceExhaustedError(
        "no room to copy blocks of the device: use more "
        "--kv-staging-mib");
  }
  std::byte* const host = staging_.piece(bytes, *piece);
  const kvtransfer::StridedDescriptor all = row(layer, own_.held());
  std::vector<kvtransfer::Descriptor> here, there;
  numbers_.clear();
  for (const uint32_t block : blocks) {
    const uint64_t at = reinterpret_cast<uint64_t>(host) + numbers_.size() * own_.bytes;
    numbers_.push_back(static_cast<uint32_t>(numbers_.size()));
    here.push_back({at, own_.bytes, 0});
    there.push_back({all.address + block * all.stride, own_.bytes, all.device});
  }
  const auto copy = [&](Op op) -> absl::Status {
    const absl::StatusOr<AgentTransferId> made =
        agent_.make_transfer(op, here, there, agent_.name(), "", kvtransfer::MemoryKind::kVram);
    if (!made.ok()) return made.status();
    absl::Status status = agent_.post(*made);
    if (status.ok()) status = agent_.wait(*made);
    agent_.release(*made).IgnoreError();
    return status;
  };
  absl::Status status = copy(Op::kRead);
  if (status.ok()) {
    KvGeometry geometry = cache_.geometry();
    geometry.layers = 1;
    use(KvCache(geometry, host, blocks.size()), 0, numbers_);
    if (changed) status = copy(Op::kWrite);
  }
  staging_.release(bytes, *piece);
  return status;
}

json CacheMover::about() const {
  return {{"identity", identity_.model},
          {"model", identity_.model},
          {"fingerprint", identity_.fingerprint},
          {"ranks", me_.ranks},
          {"kv", own_.say()}};
}

json CacheMover::about_blocks() const {
  json out = direct_->about_blocks();
  out.update(direct_->about());
  out.erase("checks");  // of what another make writes, it decides
  return out;
}

absl::StatusOr<std::vector<KvRun>> CacheMover::runs_of(const kvtransfer::KvLoad& load) const {
  if (load.first_token >= load.tokens.size() || load.first_token % kBlockTokens != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a load of tokens ", load.first_token, " to ", load.tokens.size(),
                     ": it is empty, or does not start at a block's first token"));
  }
  const size_t wanted = (load.tokens.size() - load.first_token - 1) / kBlockTokens + 1;
  if (load.blocks.size() != wanted) {
    return absl::InvalidArgumentError(
        absl::StrCat(load.blocks.size(), " blocks for KV that fills ", wanted));
  }
  for (const uint32_t block : load.blocks) {
    if (block < cache_.num_blocks()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("block ", block, " of a cache that has ", cache_.num_blocks(), " blocks"));
  }
  return std::vector<KvRun>{{.first_block = load.first_token / kBlockTokens,
                             .blocks = load.blocks,
                             .tokens = {load.first_token, load.tokens.size()}}};
}

}  // namespace baton::engine::handoff
