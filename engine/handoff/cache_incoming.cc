// Blocks of other engines into this one's cache.
#include "engine/handoff/cache_mover.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/foreign_layout.h"

namespace baton::engine::handoff {

using kvtransfer::AgentListId;
using kvtransfer::AgentTransferId;
using kvtransfer::KvRun;
using nlohmann::json;
namespace {

constexpr size_t kBatch = 256;  // blocks of one read, and bytes
constexpr size_t kBatchBytes = 16 << 20;

}  // namespace

struct CacheMover::TheirCache : Source {
  ForeignLayout layout;
  std::vector<kvtransfer::StridedDescriptor> rows;
  AgentListId blocks;
  std::vector<uint64_t> starts;  // of the rows in that list, and its end
  bool exact = false;
  bool checks = true;  // it says checksums of its blocks
  KvHeads heads;       // that it provides
  bool ours = false;   // its blocks are of this make: they are read into this cache
};

absl::StatusOr<std::shared_ptr<CacheMover::Source>> CacheMover::understand(const json& message) {
  if (const json& refused = member(message, "refused"); refused.is_string()) {
    return absl::FailedPreconditionError(refused.get<std::string>());
  }
  absl::StatusOr<ForeignLayout> layout = layout_in(message);
  if (!layout.ok()) return layout.status();
  auto source = std::make_shared<TheirCache>();
  uint64_t start = 0;
  for (const json& said : message.at("rows")) {
    const kvtransfer::StridedDescriptor row{.address = said.at(0).get<uint64_t>(),
                                            .bytes = said.at(1).get<uint64_t>(),
                                            .device = said.at(2).get<uint64_t>(),
                                            .stride = said.at(3).get<uint64_t>(),
                                            .count = said.at(4).get<uint64_t>()};
    if (row.bytes != layout->bytes || !row.span().has_value()) {
      return absl::FailedPreconditionError("its rows do not match the layout that it reports");
    }
    source->rows.push_back(row);
    source->spans.push_back(*row.span());
    source->starts.push_back(start);
    start += row.count;
  }
  source->starts.push_back(start);
  if (source->rows.size() != layout->layers.size()) {
    return absl::FailedPreconditionError("its number of rows differs from its number of layers");
  }
  // Values are rounded where the types differ, so only one's own type is exact.
  source->exact = member(message, "fingerprint") == identity_.fingerprint &&
                  layout->dtype == kvtransfer::KvDtype::kBfloat16;
  source->layout = *std::move(layout);
  source->ranks = ranks_in(message);
  if (member(message, "device") == true) source->kind = kvtransfer::MemoryKind::kVram;
  source->checks = member(message, "checks") != false;
  return source;
}

absl::StatusOr<std::shared_ptr<CacheMover::Source>> CacheMover::reach(
    const std::string& prefill, std::shared_ptr<Source> source,
    const std::shared_ptr<Source>& before) {
  auto& now = static_cast<TheirCache&>(*source);
  const uint32_t rank = rank_of(prefill, now.ranks);
  if (absl::Status status = place(now.layout, prefill, now.ranks); !status.ok()) return status;
  const kvtransfer::KvShare share{now.ranks, rank, me_.rank};
  now.heads = share.heads(me_.heads, own_.held());
  now.heads = {std::max(now.heads.first, now.layout.first_head),
               std::min(now.heads.end, now.layout.held().end)};
  if (!now.heads.empty()) {
    now.ours = now.layout == ours(now.layout.held()) && now.heads == now.layout.held();
    if (!now.ours && staging_.pieces(now.layout.bytes) == 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "a block of its cache has ", now.layout.bytes, " bytes: use more --kv-staging-mib"));
    }
  }
  const absl::StatusOr<AgentListId> list =
      agent_.prepare_remote(prefill, absl::MakeConstSpan(std::as_const(now.rows)), now.kind);
  if (!list.ok()) return list.status();
  now.blocks = *list;
  if (before == nullptr) return source;
  auto& old = static_cast<TheirCache&>(*before);
  agent_.release_list(old.blocks).IgnoreError();
  if (old.layout != now.layout || old.starts != now.starts) return source;
  old.blocks = now.blocks;
  old.rows = now.rows;
  return before;
}

// A load, from one prefill's ranks.
class CacheMover::Into : public Incoming {
 public:
  Into(CacheMover& mover, KvRun run, size_t sources, uint64_t id)
      : mover_(mover), run_(std::move(run)), id_(id), sources_(sources) {}

  // What of its blocks is wanted: those with tokens of the load.
  void join(size_t from, std::shared_ptr<const Source> source) override {
    From& its = sources_[from];
    its.source = std::static_pointer_cast<const TheirCache>(source);
    const size_t count =
        its.source->heads.empty()
            ? 0
            : blocks_of(run_.tokens.end, its.source->layout) - first_wanted(*its.source);
    its.asked_for.assign(its.source->layout.layers.size(), std::vector<bool>(count));
    its.missing.assign(its.source->layout.layers.size(), count);
    its.written.assign(its.source->layout.layers.size(), 0);
  }
  absl::Status ready(size_t from, const json& parts) override;
  absl::Status wrote(size_t from, const json& parts) override;
  absl::Status read(std::vector<Posted>* posted) override;
  absl::Status landed(AgentTransferId read, bool wanted) override;
  void held(size_t from, Time until, Time now) override {
    From& its = sources_[from];
    std::erase_if(its.doubtful, [&](Doubtful& each) {
      if (!each.ended.has_value()) each.ended = now;
      if (*each.ended > until) return false;
      --its.missing[each.layer];
      return true;
    });
  }
  bool doubts(size_t from) const override { return !sources_[from].doubtful.empty(); }
  uint32_t layers() const override {
    uint32_t layer = 0;
    while (layer < mover_.layers() && is_here(layer)) ++layer;
    return layer;
  }
  bool complete() const override { return layers() == mover_.layers(); }
  bool exact() const override {  // of those that it knows
    return std::all_of(sources_.begin(), sources_.end(), [](const From& from) {
      return from.source == nullptr || from.source->exact;
    });
  }

 private:
  struct Doubtful {
    uint32_t layer = 0;
    std::optional<Time> ended;
  };
  struct From {
    std::shared_ptr<const TheirCache> source;
    std::vector<Doubtful> doubtful;  // blocks read without a checksum, not known to have been held
    std::vector<std::vector<bool>> asked_for;  // of each row, of each block
    std::vector<size_t> missing;               // of each layer of the model
    std::vector<size_t> written;               // likewise: tokens
  };
  struct Part {
    size_t from = 0;
    size_t row = 0;
    size_t number = 0;                 // of the block in the sequence
    uint32_t block = 0;                // prefill's
    std::optional<uint32_t> checksum;  // none: of a device's memory
    uint32_t piece = 0;                // of the staging memory, or a block of this cache
  };

  size_t first_wanted(const TheirCache& of) const {
    return run_.tokens.begin / of.layout.block_tokens;
  }
  bool is_here(size_t layer) const {
    return std::all_of(sources_.begin(), sources_.end(), [layer](const From& from) {
      return from.source != nullptr && from.missing[layer] == 0;
    });
  }
  absl::StatusOr<AgentListId> local(const TheirCache& of);
  absl::StatusOr<AgentTransferId> post(const std::vector<Part>& parts);
  absl::Status take(const Part& part);
  void release(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      const TheirCache& of = *sources_[part.from].source;
      if (!of.ours) mover_.staging_.release(of.layout.bytes, part.piece);
    }
  }

  CacheMover& mover_;
  const KvRun run_;
  const uint64_t id_;
  std::vector<From> sources_;
  struct Read {
    Time begin{};
    std::vector<Part> parts;
  };
  std::vector<Part> waiting_;       // ready, not yet read
  std::map<uint64_t, Read> reads_;  // by the number of the transfer
};

absl::Status CacheMover::Into::ready(size_t from, const json& parts) {
  const TheirCache& source = *sources_[from].source;
  const size_t first = first_wanted(source);
  for (const json& part : parts) {
    const auto row = part.at(0).get<size_t>();
    auto number = part.at(1).get<size_t>();
    if (row >= source.rows.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prefill reports that row ", row, " is ready"));
    }
    std::vector<bool>& asked_for = sources_[from].asked_for[row];
    for (const json& block : part.at(2)) {
      const size_t at = number++;
      if (at < first || at - first >= asked_for.size()) continue;
      const auto theirs = block.at(0).get<uint64_t>();
      if (theirs >= source.rows[row].count) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill has no block ", theirs, ", but reports it as ready"));
      }
      if (asked_for[at - first]) continue;
      asked_for[at - first] = true;
      waiting_.push_back({.from = from,
                          .row = row,
                          .number = at,
                          .block = static_cast<uint32_t>(theirs),
                          .checksum = block.at(1).is_null()
                                          ? std::nullopt
                                          : std::optional(block.at(1).get<uint32_t>())});
    }
  }
  return absl::OkStatus();
}

// Tokens of a layer are here, in this cache. A checksum would tell whether prefill's blocks were
// its own still, which prefill itself knows here.
absl::Status CacheMover::Into::wrote(size_t from, const json& parts) {
  From& its = sources_[from];
  for (const json& part : parts) {
    const auto layer = part.at(0).get<size_t>();
    const kvtransfer::KvTokens tokens{part.at(1).get<uint64_t>(), part.at(3).get<uint64_t>()};
    const size_t all = run_.tokens.end - run_.tokens.begin;
    if (layer >= its.written.size() || tokens.empty() || tokens.begin < run_.tokens.begin ||
        tokens.end > run_.tokens.end || tokens.end - tokens.begin > all - its.written[layer]) {
      return absl::InvalidArgumentError(absl::StrCat("prefill wrote tokens [", tokens.begin, ", ",
                                                     tokens.end, ") of layer ", layer,
                                                     ", which were not asked for"));
    }
    its.written[layer] += tokens.end - tokens.begin;
    if (its.written[layer] == all) its.missing[layer] = 0;
  }
  return absl::OkStatus();
}

absl::Status CacheMover::Into::read(std::vector<Posted>* posted) {
  while (!waiting_.empty()) {
    const size_t from = waiting_[0].from;
    const TheirCache& source = *sources_[from].source;
    const size_t size = source.layout.bytes;
    const size_t most = std::clamp<size_t>(kBatchBytes / size, 1, kBatch);
    std::vector<Part> parts;
    for (Part& part : waiting_) {
      if (parts.size() == most || part.from != from) break;
      if (source.ours) {
        part.piece = run_.blocks[part.number - run_.first_block];
      } else {
        const std::optional<uint32_t> piece = mover_.staging_.allocate(size);
        if (!piece.has_value()) break;
        part.piece = *piece;
      }
      parts.push_back(part);
    }
    if (parts.empty()) return absl::OkStatus();  // later
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(parts.size()));
    const absl::StatusOr<AgentTransferId> transfer = post(parts);
    if (!transfer.ok()) {
      release(parts);
      return transfer.status();
    }
    reads_[transfer->value] = {Clock::steady().now(), std::move(parts)};
    posted->push_back({.transfer = *transfer, .from = from});
  }
  return absl::OkStatus();
}

// Where blocks of this source's go: pieces of the staging memory, or blocks of the cache.
absl::StatusOr<AgentListId> CacheMover::Into::local(const TheirCache& of) {
  const size_t size = of.layout.bytes;
  AgentListId& list = of.ours ? mover_.rows_[of.heads.first] : mover_.pieces_[size];
  if (list != AgentListId{}) return list;
  std::vector<kvtransfer::StridedDescriptor> rows;
  if (of.ours) {
    for (size_t layer = 0; layer < mover_.layers(); ++layer) {
      rows.push_back(mover_.row(layer, of.heads));
    }
  } else {
    rows.push_back({.address = reinterpret_cast<uint64_t>(mover_.staging_.base()),
                    .bytes = size,
                    .device = 0,
                    .stride = size,
                    .count = mover_.staging_.pieces(size)});
  }
  absl::StatusOr<AgentListId> made =
      mover_.agent_.prepare_local(absl::MakeConstSpan(std::as_const(rows)),
                                  of.ours ? mover_.kind() : kvtransfer::MemoryKind::kDram);
  if (made.ok()) list = *made;
  return made;
}

absl::StatusOr<AgentTransferId> CacheMover::Into::post(const std::vector<Part>& parts) {
  const TheirCache& source = *sources_[parts[0].from].source;
  std::vector<int64_t> mine, theirs;
  for (const Part& part : parts) {
    const uint64_t row = source.ours ? source.layout.layers[part.row] : 0;
    mine.push_back(static_cast<int64_t>(row * mover_.cache_.num_blocks() + part.piece));
    theirs.push_back(static_cast<int64_t>(source.starts[part.row] + part.block));
  }
  const absl::StatusOr<AgentListId> list = local(source);
  if (!list.ok()) return list.status();
  const absl::StatusOr<AgentTransferId> transfer =
      mover_.agent_.make_transfer(Op::kRead, *list, mine, source.blocks, theirs);
  if (!transfer.ok()) return transfer;
  const absl::Status status = mover_.agent_.post(*transfer);
  if (status.ok()) return transfer;
  mover_.agent_.abandon(*transfer);
  return status;
}

absl::Status CacheMover::Into::landed(AgentTransferId read, bool wanted) {
  const auto it = reads_.find(read.value);
  const Read& ended = it->second;
  const std::vector<Part>& parts = ended.parts;
  absl::Status status;
  for (const Part& part : parts) {
    if (wanted && status.ok()) status = take(part);
  }
  if (mover_.timeline_ != nullptr) {
    const ForeignLayout& layout = sources_[parts[0].from].source->layout;
    mover_.timeline_->add({.track = "transfer",
                           .name = absl::StrCat("layer ", layout.layers[parts[0].row]),
                           .begin = ended.begin,
                           .end = Clock::steady().now(),
                           .request = id_,
                           .bytes = parts.size() * layout.bytes});
  }
  release(parts);
  reads_.erase(it);
  return status;
}

// A block is here: checks it, and converts it. Where no checksum tells, it counts when prefill has
// said that it held the block until now.
absl::Status CacheMover::Into::take(const Part& part) {
  From& from = sources_[part.from];
  const ForeignLayout& layout = from.source->layout;
  const uint32_t layer = layout.layers[part.row];
  const std::byte* const block = mover_.staging_.piece(layout.bytes, part.piece);
  std::optional<uint32_t> sum;
  const bool checked = from.source->checks && part.checksum.has_value();
  if (checked && from.source->ours) {
    const kvtransfer::StridedDescriptor row = mover_.row(layer, from.source->heads);
    sum = mover_.checksum(row.address + part.piece * row.stride, row.bytes);
  } else if (checked) {
    sum = block_checksum(block, layout.bytes);
  }
  if (sum.has_value() && sum != part.checksum) {
    return absl::DataLossError(
        absl::StrCat("block ", part.number, " of row ", part.row, " has a wrong checksum"));
  }
  if (!from.source->ours) {
    // Those of this cache that it has tokens of.
    const size_t begin = std::max(run_.tokens.begin, part.number * layout.block_tokens);
    const size_t end = std::min(run_.tokens.end, (part.number + 1) * layout.block_tokens);
    const size_t first = begin / kBlockTokens;
    const auto blocks =
        absl::MakeConstSpan(run_.blocks)
            .subspan(first - run_.first_block, (end - 1) / kBlockTokens + 1 - first);
    const absl::Status copied = mover_.with_blocks(
        layer, blocks, true, [&](const KvCache& cache, int at, absl::Span<const uint32_t> numbers) {
          read_block(layout, block, part.number, cache, at,
                     {.begin = begin,
                      .end = end,
                      .first_block = first,
                      .blocks = numbers,
                      .first_head = mover_.own_.first_head});
        });
    if (!copied.ok()) return copied;
  }
  if (sum.has_value()) {
    --from.missing[layer];
  } else {
    from.doubtful.push_back({layer, std::nullopt});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CacheMover::Incoming>> CacheMover::begin(
    std::vector<KvRun> runs, size_t sources, kvtransfer::KvRequestId id) {
  return std::make_unique<Into>(*this, std::move(runs[0]), sources, id);
}

}  // namespace baton::engine::handoff
