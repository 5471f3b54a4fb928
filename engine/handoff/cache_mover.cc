// Blocks between this engine's cache and those of other makes.
#include "engine/handoff/cache_mover.h"

#include <zlib.h>

#include <algorithm>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/block_converter.h"
#include "kvtransfer/kv_checksums.h"
#include "kvtransfer/kv_packing.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::AgentListId;
using kvtransfer::AgentTransferId;
using kvtransfer::KvRun;
using nlohmann::json;

constexpr size_t kBatch = 256;  // blocks of one read, and bytes
constexpr size_t kBatchBytes = 16 << 20;

size_t blocks_of(size_t tokens, const ForeignLayout& layout) {
  return (tokens + layout.block_tokens - 1) / layout.block_tokens;
}

// All layers of a block lie in one piece of the staging memory.
size_t piece_bytes(const ForeignLayout& layout) { return layout.layers.size() * layout.bytes; }

// CRC-32, as zlib's.
uint32_t block_checksum(const std::byte* block, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const unsigned char*>(block), bytes));
}

// Of the worker agent/k in an engine of `ranks`.
uint32_t rank_of(const std::string& agent, uint32_t ranks) {
  uint32_t number = 0;
  const bool said = absl::SimpleAtoi(agent.substr(agent.rfind('/') + 1), &number);
  return said && ranks > 0 ? number % ranks : 0;
}

uint32_t ranks_in(const json& message) { return message.value("ranks", json(1)).get<uint32_t>(); }

}  // namespace

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
    return absl::FailedPreconditionError(absl::StrCat("it has another model: ", name.substr(0, 16),
                                                      ", ours ", identity_.model.substr(0, 16)));
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

// --- prefill

// What a reader's cache is, and what of it this rank provides.
struct CacheMover::ReadersCache : Reader {
  ForeignLayout part;  // of its blocks, the heads that come from here
  bool whole = true;   // ... which are all of them
  bool ours = false;
  // Of `part` as it lies in its blocks: where it reads several ranks' parts, it checks each so.
  std::optional<kvtransfer::KvChecksums> sums;
};

absl::StatusOr<std::shared_ptr<const CacheMover::Reader>> CacheMover::meet(
    const std::string& reader, const json& want) {
  absl::StatusOr<ForeignLayout> layout = layout_in(want);
  if (!layout.ok()) return layout.status();
  const uint32_t ranks = ranks_in(want);
  if (absl::Status status = place(*layout, reader, ranks); !status.ok()) return status;
  const kvtransfer::KvShare share{me_.ranks, me_.rank, rank_of(reader, ranks)};
  const KvHeads heads = share.heads(me_.heads, layout->held());
  if (heads.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", me_.rank, " of ", me_.ranks,
                                                      " has no KV heads of rank ", share.turn,
                                                      " of ", ranks));
  }
  auto out = std::make_shared<ReadersCache>();
  out->ours = *layout == ours(layout->held());
  out->whole = heads == layout->held();
  absl::StatusOr<ForeignLayout> part = out->ours ? ours(heads) : layout->part(heads);
  if (!part.ok()) return part.status();
  out->part = *std::move(part);
  if (out->ours) return out;
  if (staging_.pieces(piece_bytes(out->part)) == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a block of all layers of decode's cache has ", piece_bytes(out->part),
                     " bytes: prefill needs more --kv-staging-mib"));
  }
  if (out->whole) return out;
  const auto placed = [](const ForeignLayout& of) {
    const kvtransfer::Descriptor block{.address = 0, .bytes = of.bytes, .device = 0};
    return place_packed(write_packing(of), {.layers = {0}, .blocks = 1},
                        absl::MakeConstSpan(&block, 1), of.bytes);
  };
  const auto here = placed(out->part), there = placed(*layout);
  if (!here.ok()) return here.status();
  if (!there.ok()) return there.status();
  auto sums = kvtransfer::KvChecksums::make(here->layout, there->layout, share);
  if (!sums.ok()) return sums.status();
  out->sums = *std::move(sums);
  return out;
}

json CacheMover::layout(const json& want,
                        const absl::StatusOr<std::shared_ptr<const Reader>>& reader) {
  json message = {{"model", identity_.model},
                  {"fingerprint", identity_.fingerprint},
                  {"ranks", me_.ranks},
                  {"rows", json::array()}};
  if (!reader.ok()) {
    const std::string why(reader.status().message());
    message["refused"] = why;
    message["identity"] = why;  // for a reader that compares it with its own, and shows both
    return message;
  }
  // We have found that the KV will be what its engine expects: its own identity says so to it.
  message["identity"] = member(want, "identity");
  const auto& its = static_cast<const ReadersCache&>(**reader);
  const ForeignLayout& part = its.part;
  message["kv"] = its.whole && !its.ours ? member(want, "kv") : part.say();
  if (its.ours && device_.has_value()) message["memory"] = "vram";
  if (!its.whole) {  // else its blocks are like the reader's
    message["kinds"] = {message["kv"]};
    message["layers"] = std::vector<int>(part.layers.size());
  }
  const size_t stride = piece_bytes(part);
  const auto base = reinterpret_cast<uint64_t>(staging_.base());
  for (size_t i = 0; i < part.layers.size(); ++i) {
    const kvtransfer::StridedDescriptor said =
        its.ours ? row(part.layers[i], part.held())
                 : kvtransfer::StridedDescriptor{.address = base + i * part.bytes,
                                                 .bytes = part.bytes,
                                                 .device = 0,
                                                 .stride = stride,
                                                 .count = staging_.pieces(stride)};
    message["rows"].push_back({said.address, said.bytes, said.device, said.stride, said.count});
  }
  return message;
}

// A request's blocks, and how far they are computed.
class CacheMover::Blocks : public Kept {
 public:
  Blocks(CacheMover& its, size_t prompt)
      : mover(its), tokens(prompt), computed_tokens(its.layers()) {}

  // False where the request is computed again, in other blocks: readers in place hear of them anew.
  bool computed(uint32_t layer, uint64_t /*first_block*/, size_t count,
                absl::Span<const uint32_t> engines) override {
    if (blocks.size() < engines.size()) blocks.assign(engines.begin(), engines.end());
    computed_tokens[layer] = std::max(computed_tokens[layer], count);
    return !std::exchange(moved_, false);
  }
  void restart() override;
  std::shared_ptr<Outgoing> show(const std::shared_ptr<const Reader>& reader, bool there,
                                 const json& want) override;

  CacheMover& mover;
  const size_t tokens;  // of the prompt
  std::vector<uint32_t> blocks;
  std::vector<size_t> computed_tokens;  // of each layer

 private:
  std::vector<std::shared_ptr<Shown>> shown_;
  bool moved_ = false;
};

// ... and what of them a reader sees: blocks of its size, of each row the first ones.
class CacheMover::Shown : public Outgoing {
 public:
  Shown(const Blocks& of, std::shared_ptr<const ReadersCache> its)
      : reader(std::move(its)), kept_(of), checksums_(reader->part.layers.size()) {}

  absl::Status fits() const override { return failed_; }
  size_t next() override {
    commit();
    for (row_ = 0; row_ < checksums_.size(); ++row_) {
      const ForeignLayout& layout = reader->part;
      const size_t number = checksums_[row_].size();
      if (number >= complete(row_)) continue;
      const size_t last = ((number + 1) * layout.block_tokens - 1) / kBlockTokens;
      first_ = number * layout.block_tokens / kBlockTokens;
      source_.assign(
          kept_.blocks.begin() + static_cast<ptrdiff_t>(first_),
          kept_.blocks.begin() + static_cast<ptrdiff_t>(std::min(kept_.blocks.size(), last + 1)));
      working_ = true;
      return layout.bytes;
    }
    return 0;
  }
  // In place: the checksum is taken while no other request has the block.
  void work() override {
    const kvtransfer::StridedDescriptor all =
        kept_.mover.row(reader->part.layers[row_], reader->part.held());
    sum_ = kept_.mover.checksum(all.address + source_[0] * all.stride, all.bytes);
  }
  size_t rows() const override { return checksums_.size(); }
  size_t ready(size_t row) const override { return checksums_[row].size(); }
  json block(size_t row, size_t number) const override {
    return {kept_.blocks[number], said(row, number)};
  }
  // What a reader has of a device's blocks, no checksum tells from what others write there.
  virtual void restart() {
    working_ = false;
    if (kept_.mover.device_.has_value()) failed_ = absl::AbortedError("its blocks were taken away");
    for (auto& row : checksums_) row.clear();
  }

  const std::shared_ptr<const ReadersCache> reader;

 protected:
  size_t wanted() const { return blocks_of(kept_.tokens, reader->part); }
  // How many blocks of the reader's size are complete in a row of its cache.
  size_t complete(size_t row) const {
    const size_t tokens = kept_.computed_tokens[reader->part.layers[row]];
    return tokens >= kept_.tokens ? wanted() : tokens / reader->part.block_tokens;
  }

  json said(size_t row, size_t number) const {
    const std::optional<uint32_t> sum = checksums_[row][number];
    return sum.has_value() ? json(*sum) : json();
  }
  // What work() has made counts, unless the blocks were taken away meanwhile.
  void commit() {
    if (std::exchange(working_, false)) checksums_[row_].push_back(sum_);
  }

  const Blocks& kept_;
  // Of each row: of its first blocks.
  std::vector<std::vector<std::optional<uint32_t>>> checksums_;
  size_t row_ = 0, first_ = 0;  // what is next, and of which blocks
  bool working_ = false;
  std::optional<uint32_t> sum_;
  absl::Status failed_;
  std::vector<uint32_t> source_;
};

// ... converted, in staging memory. What is converted already stays: computed again it is the same.
class CacheMover::Copies : public Shown {
 public:
  Copies(const Blocks& of, std::shared_ptr<const ReadersCache> its)
      : Shown(of, std::move(its)), layout_(reader->part), staging_(of.mover.staging_) {}
  ~Copies() override { release(); }

  absl::Status fits() const override {
    if (!failed_.ok()) return failed_;
    if (wanted() <= staging_.pieces(piece_bytes(layout_))) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("a prompt of ", kept_.tokens, " tokens needs ",
                                                     wanted(), " blocks of ", piece_bytes(layout_),
                                                     " bytes; use more --kv-staging-mib"));
  }
  bool make_room() override {
    while (pieces_.size() < wanted()) {
      const std::optional<uint32_t> piece = staging_.allocate(piece_bytes(layout_));
      if (!piece.has_value()) {
        release();
        return false;
      }
      pieces_.push_back(*piece);
    }
    return true;
  }
  void work() override {
    const size_t number = checksums_[row_].size();
    std::byte* const block =
        staging_.piece(piece_bytes(layout_), pieces_[number]) + row_ * layout_.bytes;
    const absl::Status copied = kept_.mover.with_blocks(
        layout_.layers[row_], source_, false,
        [&](const KvCache& cache, int layer, absl::Span<const uint32_t> blocks) {
          write_block(layout_, block, number, cache, layer,
                      {.begin = 0,
                       .end = kept_.tokens,
                       .first_block = first_,
                       .blocks = blocks,
                       .first_head = kept_.mover.own_.first_head});
        });
    if (!copied.ok()) failed_ = copied;
    sum_ = block_checksum(block, layout_.bytes);
    if (!reader->sums.has_value()) return;
    const uint32_t page = 0;
    const auto address = reinterpret_cast<uint64_t>(block);
    std::vector<uint32_t> sums;
    (void)reader->sums->add(kvtransfer::KvChecksums::Side::kSource,
                            absl::MakeConstSpan(&address, 1), {0, layout_.block_tokens},
                            {0, absl::MakeConstSpan(&page, 1)}, 0, sums);
    if (sums.size() == 1) sum_ = sums[0];
  }
  // Another rank of the reader's engine may have asked for the other heads, or will.
  bool whole() const override {
    return layout_.held() == kept_.mover.own_.held() &&
           std::all_of(checksums_.begin(), checksums_.end(),
                       [this](const auto& row) { return row.size() == wanted(); });
  }
  json block(size_t row, size_t number) const override {
    return {pieces_[number], said(row, number)};
  }
  void restart() override {}

 private:
  void release() {
    for (const uint32_t piece : pieces_) staging_.release(piece_bytes(layout_), piece);
    pieces_.clear();
  }

  const ForeignLayout& layout_;
  Staging& staging_;
  std::vector<uint32_t> pieces_;  // a block of all layers each
};

void CacheMover::Blocks::restart() {
  computed_tokens.assign(computed_tokens.size(), 0);
  blocks.clear();
  moved_ = true;
  for (const std::shared_ptr<Shown>& shown : shown_) shown->restart();
}

std::shared_ptr<CacheMover::Outgoing> CacheMover::Blocks::show(
    const std::shared_ptr<const Reader>& of, bool there, const json& /*want*/) {
  auto reader = std::static_pointer_cast<const ReadersCache>(of);
  for (const std::shared_ptr<Shown>& made : shown_) {
    if (made->reader->part == reader->part && made->reader->ours == reader->ours &&
        (there || !reader->ours)) {
      return made;
    }
  }
  if (!there) return nullptr;
  std::erase_if(shown_, [](const auto& made) { return made.use_count() == 1; });
  return shown_.emplace_back(reader->ours ? std::make_shared<Shown>(*this, std::move(reader))
                                          : std::make_shared<Copies>(*this, std::move(reader)));
}

std::unique_ptr<CacheMover::Kept> CacheMover::keep(size_t tokens) {
  return std::make_unique<Blocks>(*this, tokens);
}

// --- decode

struct CacheMover::TheirCache : Source {
  ForeignLayout layout;
  std::vector<kvtransfer::StridedDescriptor> rows;
  AgentListId blocks;
  std::vector<uint64_t> starts;  // of the rows in that list, and its end
  bool exact = false;
  KvHeads heads;      // that it provides
  bool ours = false;  // its blocks are of this make: they are read into this cache
};

json CacheMover::about() const {
  return {{"identity", identity_.model},
          {"model", identity_.model},
          {"fingerprint", identity_.fingerprint},
          {"ranks", me_.ranks},
          {"kv", own_.say()}};
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
  if (member(message, "memory") == "vram") source->kind = kvtransfer::MemoryKind::kVram;
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
  }
  absl::Status ready(size_t from, const json& parts) override;
  absl::Status read(std::vector<Posted>* posted) override;
  absl::Status landed(AgentTransferId read, bool wanted) override;
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
  struct From {
    std::shared_ptr<const TheirCache> source;
    std::vector<std::vector<bool>> asked_for;  // of each row, of each block
    std::vector<size_t> missing;               // of each layer of the model
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

// A block is here: checks it, and converts it.
absl::Status CacheMover::Into::take(const Part& part) {
  From& from = sources_[part.from];
  const ForeignLayout& layout = from.source->layout;
  const uint32_t layer = layout.layers[part.row];
  const std::byte* const block = mover_.staging_.piece(layout.bytes, part.piece);
  std::optional<uint32_t> sum;
  if (from.source->ours) {
    const kvtransfer::StridedDescriptor row = mover_.row(layer, from.source->heads);
    sum = mover_.checksum(row.address + part.piece * row.stride, row.bytes);
  } else {
    sum = block_checksum(block, layout.bytes);
  }
  if (sum.has_value() && part.checksum.has_value() && sum != part.checksum) {
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
  --from.missing[layer];
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CacheMover::Incoming>> CacheMover::begin(
    std::vector<KvRun> runs, size_t sources, kvtransfer::KvRequestId id) {
  return std::make_unique<Into>(*this, std::move(runs[0]), sources, id);
}

}  // namespace baton::engine::handoff
