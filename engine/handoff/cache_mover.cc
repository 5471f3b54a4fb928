// Blocks between this engine's cache and those of other makes.
#include "engine/handoff/cache_mover.h"

#include <zlib.h>

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/block_converter.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::AgentListId;
using kvtransfer::AgentTransferId;
using kvtransfer::KvRequestId;
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

struct ReadersCache : kvtransfer::session::KvMover::Reader {
  explicit ReadersCache(ForeignLayout its) : layout(std::move(its)) {}
  const ForeignLayout layout;
};

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
  if (name != identity_.model) {
    return absl::FailedPreconditionError(absl::StrCat("it has another model: ", name.substr(0, 16),
                                                      ", ours ", identity_.model.substr(0, 16)));
  }
  absl::StatusOr<ForeignLayout> layout = ForeignLayout::parse(member(message, "kv"));
  if (!layout.ok()) return layout.status();
  if (absl::Status status = layout->fits(cache_.geometry()); !status.ok()) return status;
  return layout;
}

// --- prefill

absl::StatusOr<std::shared_ptr<const CacheMover::Reader>> CacheMover::meet(
    const std::string& /*reader*/, const json& want) {
  absl::StatusOr<ForeignLayout> layout = layout_in(want);
  if (!layout.ok()) return layout.status();
  if (staging_.pieces(piece_bytes(*layout)) == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a block of all layers of decode's cache has ", piece_bytes(*layout),
                     " bytes: prefill needs more --kv-staging-mib"));
  }
  return std::make_shared<const ReadersCache>(*std::move(layout));
}

json CacheMover::layout(const json& want,
                        const absl::StatusOr<std::shared_ptr<const Reader>>& reader) {
  json message = {
      {"model", identity_.model}, {"fingerprint", identity_.fingerprint}, {"rows", json::array()}};
  if (!reader.ok()) {
    const std::string why(reader.status().message());
    message["refused"] = why;
    message["identity"] = why;  // for a reader that compares it with its own, and shows both
    return message;
  }
  // We have found that the KV will be what its engine expects: its own identity says so to it.
  message["identity"] = member(want, "identity");
  const ForeignLayout& layout = static_cast<const ReadersCache&>(**reader).layout;
  message["kv"] = layout.say();
  const size_t stride = piece_bytes(layout);
  const auto base = reinterpret_cast<uint64_t>(staging_.base());
  for (size_t row = 0; row < layout.layers.size(); ++row) {
    message["rows"].push_back(
        {base + row * layout.bytes, layout.bytes, 0, stride, staging_.pieces(stride)});
  }
  return message;
}

// A request's blocks, and how far they are computed.
class CacheMover::Blocks : public Kept {
 public:
  Blocks(CacheMover& its, size_t prompt)
      : mover(its), tokens(prompt), computed_tokens(its.layers()) {}

  bool computed(uint32_t layer, uint64_t /*first_block*/, size_t count,
                absl::Span<const uint32_t> engines) override {
    if (blocks.size() < engines.size()) blocks.assign(engines.begin(), engines.end());
    computed_tokens[layer] = std::max(computed_tokens[layer], count);
    return true;
  }
  // What is converted already stays: computed again it is the same.
  void restart() override {
    computed_tokens.assign(computed_tokens.size(), 0);
    blocks.clear();
  }
  std::shared_ptr<Outgoing> show(const std::shared_ptr<const Reader>& reader, bool there,
                                 const json& want) override;

  CacheMover& mover;
  const size_t tokens;  // of the prompt
  std::vector<uint32_t> blocks;
  std::vector<size_t> computed_tokens;  // of each layer

 private:
  std::vector<std::shared_ptr<Copies>> copies_;
};

// ... and what of them is converted into a reader's layout.
class CacheMover::Copies : public Outgoing {
 public:
  Copies(const Blocks& of, const ForeignLayout& its)
      : layout(its), kept_(of), staging_(of.mover.staging_), checksums_(its.layers.size()) {}
  ~Copies() override { release(); }

  absl::Status fits() const override {
    if (wanted() <= staging_.pieces(piece_bytes(layout))) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("a prompt of ", kept_.tokens, " tokens needs ",
                                                     wanted(), " blocks of ", piece_bytes(layout),
                                                     " bytes; use more --kv-staging-mib"));
  }
  bool make_room() override {
    while (pieces_.size() < wanted()) {
      const std::optional<uint32_t> piece = staging_.allocate(piece_bytes(layout));
      if (!piece.has_value()) {
        release();
        return false;
      }
      pieces_.push_back(*piece);
    }
    return true;
  }
  size_t next() override {
    for (row_ = 0; row_ < checksums_.size(); ++row_) {
      const size_t number = checksums_[row_].size();
      if (number >= complete(row_)) continue;
      const size_t last = ((number + 1) * layout.block_tokens - 1) / kBlockTokens;
      first_ = number * layout.block_tokens / kBlockTokens;
      source_.assign(
          kept_.blocks.begin() + static_cast<ptrdiff_t>(first_),
          kept_.blocks.begin() + static_cast<ptrdiff_t>(std::min(kept_.blocks.size(), last + 1)));
      return layout.bytes;
    }
    return 0;
  }
  void work() override {
    std::vector<uint32_t>& checksums = checksums_[row_];
    const size_t number = checksums.size();
    std::byte* const block =
        staging_.piece(piece_bytes(layout), pieces_[number]) + row_ * layout.bytes;
    write_block(layout, block, number, kept_.mover.cache_, static_cast<int>(layout.layers[row_]),
                {.begin = 0, .end = kept_.tokens, .first_block = first_, .blocks = source_});
    checksums.push_back(block_checksum(block, layout.bytes));
  }
  bool whole() const override {
    return std::all_of(checksums_.begin(), checksums_.end(),
                       [this](const auto& row) { return row.size() == wanted(); });
  }
  size_t rows() const override { return checksums_.size(); }
  size_t ready(size_t row) const override { return checksums_[row].size(); }
  json block(size_t row, size_t number) const override {
    return {pieces_[number], checksums_[row][number]};
  }

  const ForeignLayout layout;

 private:
  size_t wanted() const { return blocks_of(kept_.tokens, layout); }
  // How many blocks of the reader's size are complete in a row of its cache.
  size_t complete(size_t row) const {
    const size_t tokens = kept_.computed_tokens[layout.layers[row]];
    return tokens >= kept_.tokens ? wanted() : tokens / layout.block_tokens;
  }
  void release() {
    for (const uint32_t piece : pieces_) staging_.release(piece_bytes(layout), piece);
    pieces_.clear();
  }

  const Blocks& kept_;
  Staging& staging_;
  std::vector<uint32_t> pieces_;                  // a block of all layers each
  std::vector<std::vector<uint32_t>> checksums_;  // of each row: of its first blocks
  size_t row_ = 0, first_ = 0;                    // what is converted next, and of which blocks
  std::vector<uint32_t> source_;
};

std::shared_ptr<CacheMover::Outgoing> CacheMover::Blocks::show(
    const std::shared_ptr<const Reader>& reader, bool there, const json& /*want*/) {
  const ForeignLayout& layout = static_cast<const ReadersCache&>(*reader).layout;
  for (const std::shared_ptr<Copies>& made : copies_) {
    if (made->layout == layout) return made;
  }
  if (!there) return nullptr;
  std::erase_if(copies_, [](const auto& made) { return made.use_count() == 1; });
  return copies_.emplace_back(std::make_shared<Copies>(*this, layout));
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
};

json CacheMover::about() const {
  return {{"identity", identity_.model},
          {"model", identity_.model},
          {"fingerprint", identity_.fingerprint},
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
  if (staging_.pieces(layout->bytes) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a block of its cache has ", layout->bytes,
                                                     " bytes: use more --kv-staging-mib"));
  }
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
  return source;
}

absl::StatusOr<std::shared_ptr<CacheMover::Source>> CacheMover::reach(
    const std::string& prefill, std::shared_ptr<Source> source,
    const std::shared_ptr<Source>& before) {
  auto& now = static_cast<TheirCache&>(*source);
  const absl::StatusOr<AgentListId> list =
      agent_.prepare_remote(prefill, absl::MakeConstSpan(std::as_const(now.rows)));
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

// A load, from one prefill.
class CacheMover::Into : public Incoming {
 public:
  Into(CacheMover& mover, KvRun run) : mover_(mover), run_(std::move(run)) {}

  // What of its blocks is wanted: those with tokens of the load.
  void join(size_t /*from*/, std::shared_ptr<const Source> source) override {
    source_ = std::static_pointer_cast<const TheirCache>(source);
    const size_t count = blocks_of(run_.tokens.end, source_->layout) - first_wanted();
    asked_for_.assign(source_->layout.layers.size(), std::vector<bool>(count));
    missing_.assign(source_->layout.layers.size(), count);
  }
  absl::Status ready(size_t from, const json& parts) override;
  absl::Status read(std::vector<kvtransfer::session::KvMover::Posted>* posted) override;
  absl::Status landed(AgentTransferId read, bool wanted) override;
  uint32_t layers() const override {
    const auto first =
        std::find_if(missing_.begin(), missing_.end(), [](size_t m) { return m > 0; });
    return static_cast<uint32_t>(first - missing_.begin());
  }
  bool complete() const override { return source_ != nullptr && layers() == missing_.size(); }
  bool exact() const override { return source_->exact; }

 private:
  struct Part {
    size_t row = 0;
    size_t number = 0;   // of the block in the sequence
    uint32_t block = 0;  // prefill's
    uint32_t checksum = 0;
    uint32_t piece = 0;  // of the staging memory
  };

  size_t first_wanted() const { return run_.tokens.begin / source_->layout.block_tokens; }
  absl::StatusOr<AgentTransferId> post(const std::vector<Part>& parts);
  absl::Status take(const Part& part);
  void release(const std::vector<Part>& parts) {
    for (const Part& part : parts) mover_.staging_.release(source_->layout.bytes, part.piece);
  }

  CacheMover& mover_;
  const KvRun run_;
  std::shared_ptr<const TheirCache> source_;
  std::vector<Part> waiting_;                    // ready, not yet read
  std::vector<std::vector<bool>> asked_for_;     // of each row, of each block
  std::vector<size_t> missing_;                  // of each layer of the model
  std::map<uint64_t, std::vector<Part>> reads_;  // by the number of the transfer
};

absl::Status CacheMover::Into::ready(size_t /*from*/, const json& parts) {
  for (const json& part : parts) {
    const auto row = part.at(0).get<size_t>();
    auto number = part.at(1).get<size_t>();
    if (row >= asked_for_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prefill reports that row ", row, " is ready"));
    }
    std::vector<bool>& asked_for = asked_for_[row];
    for (const json& block : part.at(2)) {
      const size_t at = number++;
      if (at < first_wanted() || at - first_wanted() >= asked_for.size()) continue;
      const auto theirs = block.at(0).get<uint64_t>();
      if (theirs >= source_->rows[row].count) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill has no block ", theirs, ", but reports it as ready"));
      }
      if (asked_for[at - first_wanted()]) continue;
      asked_for[at - first_wanted()] = true;
      waiting_.push_back({.row = row,
                          .number = at,
                          .block = static_cast<uint32_t>(theirs),
                          .checksum = block.at(1).get<uint32_t>()});
    }
  }
  return absl::OkStatus();
}

absl::Status CacheMover::Into::read(std::vector<kvtransfer::session::KvMover::Posted>* posted) {
  while (!waiting_.empty()) {
    const size_t size = source_->layout.bytes;
    const size_t most = std::clamp<size_t>(kBatchBytes / size, 1, kBatch);
    std::vector<Part> parts;
    for (Part& part : waiting_) {
      if (parts.size() == most) break;
      const std::optional<uint32_t> piece = mover_.staging_.allocate(size);
      if (!piece.has_value()) break;
      part.piece = *piece;
      parts.push_back(part);
    }
    if (parts.empty()) return absl::OkStatus();  // later
    waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(parts.size()));
    const absl::StatusOr<AgentTransferId> transfer = post(parts);
    if (!transfer.ok()) {
      release(parts);
      return transfer.status();
    }
    reads_[transfer->value] = std::move(parts);
    posted->push_back({.transfer = *transfer});
  }
  return absl::OkStatus();
}

absl::StatusOr<AgentTransferId> CacheMover::Into::post(const std::vector<Part>& parts) {
  const size_t size = source_->layout.bytes;
  std::vector<int64_t> mine, theirs;
  for (const Part& part : parts) {
    mine.push_back(part.piece);
    theirs.push_back(static_cast<int64_t>(source_->starts[part.row] + part.block));
  }
  AgentListId& local = mover_.local_[size];
  if (local == AgentListId{}) {
    const kvtransfer::StridedDescriptor row{
        .address = reinterpret_cast<uint64_t>(mover_.staging_.base()),
        .bytes = size,
        .device = 0,
        .stride = size,
        .count = mover_.staging_.pieces(size)};
    const auto list = mover_.agent_.prepare_local(absl::MakeConstSpan(&row, 1));
    if (!list.ok()) return list.status();
    local = *list;
  }
  const absl::StatusOr<AgentTransferId> transfer =
      mover_.agent_.make_transfer(Op::kRead, local, mine, source_->blocks, theirs);
  if (!transfer.ok()) return transfer;
  const absl::Status status = mover_.agent_.post(*transfer);
  if (status.ok()) return transfer;
  mover_.agent_.abandon(*transfer);
  return status;
}

absl::Status CacheMover::Into::landed(AgentTransferId read, bool wanted) {
  const auto it = reads_.find(read.value);
  absl::Status status;
  for (const Part& part : it->second) {
    if (wanted && status.ok()) status = take(part);
  }
  release(it->second);
  reads_.erase(it);
  return status;
}

// A block is here: checks it, and converts it.
absl::Status CacheMover::Into::take(const Part& part) {
  const ForeignLayout& layout = source_->layout;
  const std::byte* const block = mover_.staging_.piece(layout.bytes, part.piece);
  if (block_checksum(block, layout.bytes) != part.checksum) {
    return absl::DataLossError(
        absl::StrCat("block ", part.number, " of row ", part.row, " has a wrong checksum"));
  }
  const uint32_t layer = layout.layers[part.row];
  read_block(layout, block, part.number, mover_.cache_, static_cast<int>(layer),
             {.begin = run_.tokens.begin,
              .end = run_.tokens.end,
              .first_block = run_.first_block,
              .blocks = run_.blocks});
  --missing_[layer];
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CacheMover::Incoming>> CacheMover::begin(std::vector<KvRun> runs,
                                                                        size_t /*sources*/,
                                                                        KvRequestId /*id*/) {
  return std::make_unique<Into>(*this, std::move(runs[0]));
}

}  // namespace baton::engine::handoff
