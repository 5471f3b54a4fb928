// Prefill's half of a direct session: blocks with their checksums, and writes into those that a
// reader names.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/direct_cache.h"

namespace baton::kvtransfer::session::direct {
namespace {

using Side = KvChecksums::Side;

struct Blocks : KvMover::Kept {
  struct Row {
    uint64_t first = 0;
    std::vector<uint32_t> blocks, sums;
  };
  explicit Blocks(Cache& its) : cache(its), rows(its.layers.size()) {}

  // The checksums are taken now, while no other request can have the blocks.
  bool computed(uint32_t layer, uint64_t first_block, size_t /*tokens*/,
                absl::Span<const uint32_t> blocks) override {
    Row& row = rows[layer];
    const absl::Span<const uint32_t> known(row.blocks);
    const size_t count = std::min(known.size(), blocks.size());
    const bool same = known.empty() || (row.first == first_block &&
                                        known.subspan(0, count) == blocks.subspan(0, count));
    if (!same) row = {};
    row.first = first_block;
    for (size_t i = row.blocks.size(); i < blocks.size(); ++i) {
      row.blocks.push_back(blocks[i]);
      if (cache.checks) row.sums.push_back(cache.layers[layer].crc(blocks[i]));
    }
    return same;
  }
  void restart() override {}  // computed() sees other blocks
  std::shared_ptr<KvMover::Outgoing> show(const std::shared_ptr<const KvMover::Reader>& reader,
                                          bool there, const json& want) override;
  Cache& cache;
  std::vector<Row> rows;
};

// What a reader wants of a layer.
struct Wanted {
  uint32_t layer = 0;  // the reader's
  KvTokens tokens;
  uint64_t first = 0, count = 0;  // our blocks that hold them
  uint64_t written = 0;           // tokens before this one are under way, or there
  size_t run = 0;
};

class Shown : public KvMover::Outgoing {
 public:
  Shown(const Blocks& of, std::shared_ptr<const Readers> its, const json& want)
      : kept_(of), reader_(std::move(its)), wrote_{{"kind", "wrote"}} {
    for (const char* const name : {"transfer", "load"}) {
      if (want.contains(name)) wrote_[name] = want[name];
    }
    if (!want.contains("runs")) return;
    for (const json& run : want["runs"]) {
      runs_.push_back({run.at(0).get<uint64_t>(),
                       run.at(1).get<std::vector<uint32_t>>(),
                       {run.at(2).get<uint64_t>(), run.at(3).get<uint64_t>()}});
    }
    push_ = want.value("push", json()) == true;
    share_ = {.ranks = kept_.cache.worker.ranks,
              .rank = kept_.cache.worker.rank,
              .turn = rank_of(reader_->agent, ranks_in(want))};
    if (want.contains("share")) {
      const json& share = want["share"];
      share_ = {share.at(0).get<uint32_t>(), share.at(1).get<uint32_t>(),
                share.at(2).get<uint64_t>()};
    }
    if (share_.ranks == 0 || share_.rank >= share_.ranks || share_.ranks > kMostRanks) {
      why_ = absl::InvalidArgumentError("the share of the heads is out of range");
      return;
    }
    choose(want.at("groups"));
    if (!why_.ok()) return;
    if (!push_) {
      why_ = reader_->fits.get(share_, [&] { return fits_of(); })->why;
      return;
    }
    routes_ = reader_->routes.get(share_, [&] {
      return routes_of(kept_.cache, Op::kWrite, reader_->agent, reader_->layers, share_,
                       reader_->checks);
    });
    why_ = routes_->why;
  }

  absl::Status fits() const override { return why_; }
  size_t rows() const override { return kept_.rows.size(); }
  uint64_t first(size_t row) const override {
    return wanted_.empty() ? kept_.rows[row].first : wanted_[row].first;
  }
  size_t ready(size_t row) const override {
    const Blocks::Row& its = kept_.rows[row];
    if (wanted_.empty()) return its.blocks.size();
    const Wanted& wanted = wanted_[row];
    const uint64_t end = its.first + its.blocks.size();
    if (its.first > wanted.first || end <= wanted.first) return 0;
    return std::min(end - wanted.first, wanted.count);
  }
  size_t missing() const override {
    size_t count = 0;
    for (size_t row = 0; row < wanted_.size(); ++row) count += wanted_[row].count - ready(row);
    return count;
  }
  size_t checksums(size_t row) const override {
    if (!reader_->checks) return 1;
    const auto& sums = reader_->sums[row];
    return sums.has_value() ? kept_.cache.layers[row].tokens() / sums->unit() : 1;
  }
  // A reader that does not read whole blocks gets checksums of its pieces. The whole block's
  // checksum is taken again then: if another request has the block by now, no piece is right.
  json block(size_t row, size_t counted) const override {
    const size_t number = first(row) + counted - kept_.rows[row].first;
    const uint32_t block = kept_.rows[row].blocks[number];
    if (!reader_->checks) return {block, 0};
    const uint32_t whole = kept_.rows[row].sums[number];
    const auto& sums = reader_->sums[row];
    if (!sums.has_value()) return {block, whole};
    const Layer& layer = kept_.cache.layers[row];
    std::vector<uint32_t> pieces;
    const absl::Status good =
        sums->add(Side::kSource, layer.placement.addresses, {0, layer.tokens()},
                  {0, absl::MakeConstSpan(&block, 1)}, 0, pieces);
    if (good.ok() && layer.crc(block) == whole) return {block, pieces};
    return {block, json::array_t(checksums(row), -1)};
  }

  // Writes, to a reader that names its blocks: what of a layer is computed, and not written.
  size_t next() override {
    for (size_t row = 0; push_ && why_.ok() && row < wanted_.size(); ++row) {
      Wanted& wanted = wanted_[row];
      if (wanted.count == 0) continue;
      const uint64_t size = kept_.cache.layers[row].tokens();
      const uint64_t end = std::min((wanted.first + ready(row)) * size, wanted.tokens.end);
      if (end <= wanted.written) continue;
      next_row_ = row;
      next_tokens_ = {wanted.written, end};
      const auto& blocks = kept_.rows[row].blocks;
      next_blocks_.assign(blocks.begin(), blocks.end());
      next_first_ = kept_.rows[row].first;
      wanted.written = end;
      const Passage& one = routes_->passages[row];
      const uint64_t each = moves(one) ? one.plan->plan().parts()[0].bytes_per_token() : 0;
      return each * (end - next_tokens_.begin) + 1;
    }
    return 0;
  }
  void work() override { write().IgnoreError(); }
  absl::StatusOr<std::vector<Write>> begun() override {
    if (!why_.ok()) return why_;
    return std::exchange(begun_, {});
  }

 private:
  // The layers that both have, by their numbers, and which blocks of ours hold what is wanted.
  void choose(const json& groups) {
    const Cache& cache = kept_.cache;
    wanted_.resize(cache.layers.size());
    size_t found = 0;
    for (size_t their = 0; their < reader_->layers.size(); ++their) {
      const uint32_t number = reader_->layers[their].number;
      const auto ours = std::find_if(cache.layers.begin(), cache.layers.end(),
                                     [&](const Layer& each) { return each.number == number; });
      const size_t run = groups.at(their).get<size_t>();
      if (ours == cache.layers.end() || run >= runs_.size()) continue;
      ++found;
      Wanted& wanted = wanted_[static_cast<size_t>(ours - cache.layers.begin())];
      wanted.layer = static_cast<uint32_t>(their);
      wanted.tokens = runs_[run].tokens;
      wanted.run = run;
      if (wanted.tokens.empty()) continue;
      wanted.first = wanted.tokens.begin / ours->tokens();
      wanted.count = (wanted.tokens.end - 1) / ours->tokens() + 1 - wanted.first;
      wanted.written = wanted.tokens.begin;
    }
    if (found == reader_->layers.size() && found > 0) return;
    why_ = absl::FailedPreconditionError(
        "this prefill worker does not hold all layers of the decode worker: ask one that does");
  }
  Routes fits_of() const {
    Routes out;
    for (size_t row = 0; row < wanted_.size() && out.why.ok(); ++row) {
      if (wanted_[row].count == 0) continue;
      const auto plan = KvPlan::make(kept_.cache.layers[row].placement.layout,
                                     reader_->layers[wanted_[row].layer].placement.layout, share_);
      out.why = plan.ok() ? check_complete(*plan, share_) : plan.status();
    }
    return out;
  }
  absl::Status write() {
    const Layer& layer = kept_.cache.layers[next_row_];
    const Wanted& wanted = wanted_[next_row_];
    const Passage& one = routes_->passages[next_row_];
    std::vector<uint32_t> sums;
    if (one.sums.has_value()) {
      const std::vector<uint32_t> blocks(next_blocks_.begin(), next_blocks_.end());
      why_ = one.sums->add(Side::kSource, layer.placement.addresses, next_tokens_,
                           {next_first_, blocks}, 0, sums);
      if (!why_.ok()) return why_;
    }
    json message = wrote_;
    message["parts"] = {{wanted.layer, next_tokens_.begin, std::move(sums), next_tokens_.end}};
    const KvRun& run = runs_[wanted.run];
    const std::vector<int64_t> theirs(run.blocks.begin(), run.blocks.end());
    AgentKvRequest request;
    request.tokens = next_tokens_;
    request.local.push_back({next_blocks_, next_first_});
    request.remote.push_back({theirs, run.first_block});
    Agent& agent = kept_.cache.agent;
    const auto transfer = one.plan->make_transfer(agent, request, message.dump());
    why_ = transfer.status();
    if (!why_.ok()) return why_;
    why_ = agent.post(*transfer);
    if (why_.ok()) {
      begun_.push_back({*transfer, static_cast<uint32_t>(next_row_)});
    } else {
      agent.abandon(*transfer);
    }
    return why_;
  }

  const Blocks& kept_;
  const std::shared_ptr<const Readers> reader_;
  json wrote_;  // what each of its messages says
  bool push_ = false;
  KvShare share_;
  std::vector<KvRun> runs_;               // the reader's; empty: it does not say what it wants
  std::vector<Wanted> wanted_;            // of each row
  std::shared_ptr<const Routes> routes_;  // where it is written to
  absl::Status why_;
  size_t next_row_ = 0;
  KvTokens next_tokens_;
  std::vector<int64_t> next_blocks_;
  uint64_t next_first_ = 0;
  std::vector<Write> begun_;
};

std::shared_ptr<KvMover::Outgoing> Blocks::show(
    const std::shared_ptr<const KvMover::Reader>& reader, bool there, const json& want) {
  if (!there) return nullptr;
  return std::make_shared<Shown>(*this, std::static_pointer_cast<const Readers>(reader), want);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const KvMover::Reader>> meet_reader(const Cache& cache,
                                                                   const std::string& reader,
                                                                   const json& want) {
  auto out = std::make_shared<Readers>();
  out->agent = reader;
  out->checks = cache.checks && checks_in(want);
  out->sums.resize(cache.layers.size());
  if (want.contains("placement") || want.contains("rows")) {
    auto theirs = layers_in(want, want);
    if (!theirs.ok()) return theirs.status();
    out->layers = *std::move(theirs);
  }
  const json model = cache.said.value("model", json());
  if (model.is_string() && !model.get_ref<const std::string&>().empty() &&
      want.value("model", json()) == model) {
    // One of another make names its checkpoint as we do.
    for (Layer& layer : out->layers) {
      layer.placement.layout.model = cache.layers[0].placement.layout.model;
    }
  }
  if (!out->checks) return out;
  const KvWorker& me = cache.worker;
  const KvShare share{me.ranks, me.rank, rank_of(reader, ranks_in(want))};
  for (size_t i = 0; i < cache.layers.size() && want.contains("kinds"); ++i) {
    const Layer& ours = cache.layers[i];
    const json& packing = packing_in(want, i);
    const json& bytes = packing.at("bytes");
    const auto theirs =
        layer_of({0, bytes, 0, bytes, 1}, packing, cache.said.at("identity"), MemoryKind::kDram);
    if (!theirs.ok()) continue;  // the two do not fit, and decode says why
    auto sums = KvChecksums::make(ours.placement.layout, theirs->placement.layout, share);
    const bool whole = !sums.ok() || sums->unit() == 0 || sums->run_bytes() == ours.row.bytes;
    if (!whole) out->sums[i] = *std::move(sums);
  }
  return out;
}

absl::Status serves_reader(Cache& cache, std::shared_ptr<const Readers> reader, const json& want) {
  const Blocks none(cache);
  return Shown(none, std::move(reader), want).fits();
}

std::unique_ptr<KvMover::Kept> keep_blocks(Cache& cache) { return std::make_unique<Blocks>(cache); }

}  // namespace baton::kvtransfer::session::direct
