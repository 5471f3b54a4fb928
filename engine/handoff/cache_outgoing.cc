// Blocks of this engine for readers of any make: read in place, converted into staging memory, or
// written.
#include "engine/handoff/cache_mover.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/foreign_layout.h"
#include "kvtransfer/kv_checksums.h"
#include "kvtransfer/kv_packing.h"

namespace baton::engine::handoff {

using kvtransfer::AgentTransferId;
using nlohmann::json;
namespace {

// All layers of a block lie in one piece of the staging memory.
size_t piece_bytes(const ForeignLayout& layout) { return layout.layers.size() * layout.bytes; }

}  // namespace

// What a reader's cache is, and what of it this rank provides.
struct CacheMover::ReadersCache : Reader {
  std::string agent;
  uint64_t rank = 0;   // of its engine
  ForeignLayout part;  // of its blocks, the heads that come from here
  bool whole = true;   // ... which are all of them
  bool ours = false;
  // Of `part` as it lies in its blocks: where it reads several ranks' parts, it checks each so.
  std::optional<kvtransfer::KvChecksums> sums;
  // How it is written to, known when it has said where its blocks lie. The session's thread.
  mutable std::shared_ptr<const Reader> direct;
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
  out->agent = reader;
  out->rank = share.turn;
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
  if (its.ours && device_.has_value()) message["device"] = true;
  if (!its.whole) {  // else its blocks are like the reader's
    message["kinds"] = json::array({message["kv"]});
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
      : mover(its),
        tokens(prompt),
        computed_tokens(its.layers()),
        direct_(its.direct_->keep(prompt)) {}

  // False where the request is computed again, in other blocks: readers in place hear of them anew.
  bool computed(uint32_t layer, uint64_t /*first_block*/, size_t count,
                absl::Span<const uint32_t> engines) override {
    if (blocks.size() < engines.size()) blocks.assign(engines.begin(), engines.end());
    computed_tokens[layer] = std::max(computed_tokens[layer], count);
    const size_t whole = count >= tokens ? (tokens - 1) / kBlockTokens + 1 : count / kBlockTokens;
    direct_->computed(layer, 0, count, engines.subspan(0, whole));
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
  const std::unique_ptr<Kept> direct_;  // the same, for those that are written to
  std::vector<std::shared_ptr<Shown>> shown_;
  std::vector<std::weak_ptr<Written>> written_;
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
  // The checksums of each row's first blocks.
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

// ... written into its blocks by a plan, whatever these look like. One whose blocks are taken away
// before all is written fails.
class CacheMover::Written : public Outgoing {
 public:
  Written(kvtransfer::Agent& agent, std::shared_ptr<Outgoing> writes)
      : agent_(agent), writes_(std::move(writes)) {}

  absl::Status fits() const override {
    const std::lock_guard lock(mutex_);
    return stopped_.ok() ? writes_->fits() : stopped_;
  }
  size_t next() override { return fits().ok() ? writes_->next() : 0; }
  void work() override {
    const std::lock_guard lock(mutex_);
    if (stopped_.ok()) writes_->work();
    auto begun = writes_->begun();
    if (!begun.ok()) return;  // begun() says so again
    for (const Write& write : *begun) {
      new_.push_back(write);
      running_.push_back(write.transfer);
    }
  }
  size_t rows() const override { return writes_->rows(); }
  size_t ready(size_t row) const override { return writes_->ready(row); }
  json block(size_t row, size_t number) const override { return writes_->block(row, number); }
  size_t missing() const override { return writes_->missing(); }
  absl::StatusOr<std::vector<Write>> begun() override {
    const std::lock_guard lock(mutex_);
    if (auto more = writes_->begun(); !more.ok()) return more.status();
    return std::exchange(new_, {});
  }
  // Engine. Nothing reads the blocks when it returns.
  void restart() {
    const std::lock_guard lock(mutex_);
    bool moves = writes_->missing() > 0 || writes_->next() > 0;
    for (const AgentTransferId write : running_) {  // one that the session has released is over
      const auto state = agent_.state(write);
      if (!state.ok() || *state != kvtransfer::AgentTransferState::kRunning) continue;
      moves = true;
      agent_.abort(write).IgnoreError();
      agent_.wait(write).IgnoreError();
    }
    running_.clear();
    if (moves) stopped_ = absl::AbortedError("its blocks were taken away");
  }

 private:
  kvtransfer::Agent& agent_;
  const std::shared_ptr<Outgoing> writes_;
  mutable std::mutex mutex_;
  std::vector<AgentTransferId> running_;  // or over
  std::vector<Write> new_;                // of those that the session does not know
  absl::Status stopped_;
};

void CacheMover::Blocks::restart() {
  computed_tokens.assign(computed_tokens.size(), 0);
  blocks.clear();
  moved_ = true;
  for (const std::shared_ptr<Shown>& shown : shown_) shown->restart();
  for (const std::weak_ptr<Written>& each : written_) {
    if (const std::shared_ptr<Written> written = each.lock()) written->restart();
  }
}

std::shared_ptr<CacheMover::Outgoing> CacheMover::Blocks::show(
    const std::shared_ptr<const Reader>& of, bool there, const json& want) {
  auto reader = std::static_pointer_cast<const ReadersCache>(of);
  if (member(want, "push") == true) {
    json said = want;
    said["identity"] = kOwnWeights;  // meet() has compared the models
    said["share"] = {mover.me_.ranks, mover.me_.rank, reader->rank};
    if (reader->direct == nullptr) {
      auto met = mover.direct_->meet(reader->agent, said);
      if (met.ok()) reader->direct = *met;
    }
    auto writes = reader->direct == nullptr ? nullptr : direct_->show(reader->direct, there, said);
    if (writes == nullptr) return nullptr;
    auto written = std::make_shared<Written>(mover.agent_, std::move(writes));
    std::erase_if(written_, [](const auto& each) { return each.expired(); });
    written_.push_back(written);
    return written;
  }
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

}  // namespace baton::engine::handoff
