// Plans and checksums between two caches, a pair of them for each layer.
#include "kvtransfer/session/direct_mover.h"

#include <zlib.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_checksums.h"
#include "kvtransfer/kv_packing.h"
#include "kvtransfer/session/core.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;
using Side = KvChecksums::Side;

constexpr std::chrono::duration<double> kLongestLease = std::chrono::hours(24 * 365);
constexpr Time kDriven = std::chrono::microseconds(500);  // for which reads are moved at once

struct Layer {
  KvPlacement placement;  // of this layer alone
  StridedDescriptor row;
  size_t group = 0;
  uint32_t tokens() const { return placement.layout.groups[0].block_tokens; }  // of a block
  uint32_t crc(uint32_t block) const {
    const uint64_t address = row.address + block * row.stride;
    return static_cast<uint32_t>(
        crc32_z(0, reinterpret_cast<const unsigned char*>(address), row.bytes));
  }
};

// This worker's cache.
struct Cache {
  Agent& agent;
  KvWorker worker;
  json said, want;  // without rows
  std::vector<Layer> layers{};
  size_t groups = 0;
};

const json& packing_in(const json& message, size_t layer) {
  return message.at("kinds").at(message.at("layers").at(layer).get<size_t>());
}

absl::StatusOr<Layer> layer_of(const json& row, const json& packing, const json& identity) {
  Layer out;
  out.row = {row.at(0).get<uint64_t>(), row.at(1).get<uint64_t>(), row.at(2).get<uint64_t>(),
             row.at(3).get<uint64_t>(), row.at(4).get<uint64_t>()};
  const std::optional<Descriptor> span = out.row.span();
  if (!span.has_value() || out.row.count > UINT32_MAX) {
    return absl::InvalidArgumentError("a row of a cache covers nothing, or too much");
  }
  KvGroup group;
  group.layers = {0};
  group.blocks = static_cast<uint32_t>(out.row.count);
  absl::StatusOr<KvPlacement> placed =
      place_packed(packing.dump(), group, absl::MakeConstSpan(&*span, 1), out.row.stride);
  if (!placed.ok()) return placed.status();
  out.placement = *std::move(placed);
  out.placement.layout.model.weights = identity.get<std::string>();
  return out;
}

// The tensor-parallel rank of worker agent/k in an engine with `ranks` of them.
uint32_t rank_of(absl::string_view agent, uint32_t ranks) {
  uint32_t number = 0;
  const bool said = absl::SimpleAtoi(agent.substr(agent.rfind('/') + 1), &number);
  return said && ranks > 0 ? number % ranks : 0;
}

uint32_t ranks_in(const json& message) { return message.value("ranks", json(1)).get<uint32_t>(); }

// --- prefill

// For each layer, how to take the checksums of what a reader reads; none: those of whole blocks.
struct Readers : KvMover::Reader {
  std::vector<std::optional<KvChecksums>> sums;
};

struct Blocks : KvMover::Kept {
  struct Row {
    uint64_t first = 0;
    std::vector<uint32_t> blocks, sums;
  };
  explicit Blocks(const Cache& its) : cache(its), rows(its.layers.size()) {}

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
      row.sums.push_back(cache.layers[layer].crc(blocks[i]));
    }
    return same;
  }
  void restart() override {}  // computed() sees other blocks
  std::shared_ptr<KvMover::Outgoing> show(const std::shared_ptr<const KvMover::Reader>& reader,
                                          bool there) override;
  const Cache& cache;
  std::vector<Row> rows;
};

struct Shown : KvMover::Outgoing {
  Shown(const Blocks& of, std::shared_ptr<const Readers> its) : kept(of), reader(std::move(its)) {}

  size_t rows() const override { return kept.rows.size(); }
  uint64_t first(size_t row) const override { return kept.rows[row].first; }
  size_t ready(size_t row) const override { return kept.rows[row].blocks.size(); }
  size_t checksums(size_t row) const override {
    const auto& sums = reader->sums[row];
    return sums.has_value() ? kept.cache.layers[row].tokens() / sums->unit() : 1;
  }
  // A reader that does not read whole blocks gets checksums of its pieces. The whole block's
  // checksum is taken again then: if another request has the block by now, no piece is right.
  json block(size_t row, size_t number) const override {
    const uint32_t block = kept.rows[row].blocks[number];
    const uint32_t whole = kept.rows[row].sums[number];
    const auto& sums = reader->sums[row];
    if (!sums.has_value()) return {block, whole};
    const Layer& layer = kept.cache.layers[row];
    std::vector<uint32_t> pieces;
    const absl::Status good =
        sums->add(Side::kSource, layer.placement.addresses, {0, layer.tokens()},
                  {0, absl::MakeConstSpan(&block, 1)}, 0, pieces);
    if (good.ok() && layer.crc(block) == whole) return {block, pieces};
    return {block, json::array_t(checksums(row), -1)};
  }
  const Blocks& kept;
  const std::shared_ptr<const Readers> reader;
};

std::shared_ptr<KvMover::Outgoing> Blocks::show(
    const std::shared_ptr<const KvMover::Reader>& reader, bool there) {
  if (!there) return nullptr;
  return std::make_shared<Shown>(*this, std::static_pointer_cast<const Readers>(reader));
}

// --- decode

struct Theirs : KvMover::Source {
  struct Passage {  // from a layer there to the same here
    AgentKvPlan plan;
    KvChecksums sums;
    uint32_t tokens = 0;  // of a block there
  };
  json said;
  std::vector<Layer> layers;
  std::vector<Passage> passages;
};

// A load, from the workers of a prefill.
class Into : public KvMover::Incoming {
 public:
  Into(Cache& cache, std::vector<KvRun> runs, size_t sources)
      : cache_(cache), runs_(std::move(runs)), sources_(sources) {}

  void join(size_t from, std::shared_ptr<const KvMover::Source> source) override {
    sources_[from].theirs = std::static_pointer_cast<const Theirs>(source);
    for (const Layer& layer : cache_.layers) {
      sources_[from].next.push_back(runs_[layer.group].tokens.begin);
    }
  }
  absl::Status ready(size_t from, const json& parts) override;
  absl::Status read(std::vector<KvMover::Posted>* posted) override;
  absl::Status landed(AgentTransferId read, bool wanted) override {
    const auto it = std::find_if(reads_.begin(), reads_.end(),
                                 [read](const Read& each) { return each.transfer == read; });
    const absl::Status good = wanted ? check(*it) : absl::OkStatus();
    reads_.erase(it);
    return good;
  }
  uint32_t layers() const override {
    uint32_t layer = 0;
    while (layer < cache_.layers.size() && is_here(layer)) ++layer;
    return layer;
  }
  bool complete() const override { return layers() == cache_.layers.size(); }
  bool exact() const override { return true; }  // it is the same cache, by its identity

 private:
  struct From {
    std::shared_ptr<const Theirs> theirs;
    std::vector<uint64_t> next;  // of each layer, the first token that was not asked for
  };
  // Reads `tokens` out of a worker's `blocks`, the first of which is its number first_block.
  struct Read {
    size_t from = 0;
    uint32_t layer = 0;
    uint64_t first_block = 0;
    KvTokens tokens;
    std::vector<int64_t> blocks;
    std::vector<int64_t> checks;  // of each block, or of each piece of them
    AgentTransferId transfer;
  };

  const KvRun& run(uint32_t layer) const { return runs_[cache_.layers[layer].group]; }
  bool is_here(uint32_t layer) const {
    const auto is_read = [&](const From& from) {
      return from.theirs != nullptr && (from.theirs->passages[layer].sums.unit() == 0 ||
                                        from.next[layer] >= run(layer).tokens.end);
    };
    return std::all_of(sources_.begin(), sources_.end(), is_read) &&
           std::none_of(reads_.begin(), reads_.end(),
                        [layer](const Read& each) { return each.layer == layer; });
  }
  absl::Status check(const Read& read) const;

  Cache& cache_;
  const std::vector<KvRun> runs_;
  std::vector<From> sources_;
  std::vector<Read> reads_;
};

absl::Status Into::ready(size_t from, const json& parts) {
  From& source = sources_[from];
  for (const json& part : parts) {
    const auto layer = part.at(0).get<uint32_t>();
    const auto first = part.at(1).get<uint64_t>();
    if (layer >= cache_.layers.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prefill reports that layer ", layer, " is ready"));
    }
    const Theirs::Passage& passage = source.theirs->passages[layer];
    const uint64_t size = passage.tokens, begin = source.next[layer];
    const uint64_t end = std::min((first + part.at(2).size()) * size, run(layer).tokens.end);
    if (passage.sums.unit() == 0 || begin >= end) continue;
    if (begin < first * size) {
      // Both sides keep a window in whole blocks: an engine gives ours to other prompts.
      return absl::FailedPreconditionError(
          absl::StrCat("prefill does not keep token ", begin, " of layer ", layer,
                       "'s window: give it blocks that are not smaller than these here"));
    }
    Read read{from, layer, first, {begin, end}, {}, {}, {}};
    for (const json& block : part.at(2)) {
      read.blocks.push_back(block.at(0).get<int64_t>());
      const json& sums = block.at(1);
      for (const json& sum : sums.is_array() ? sums : json::array({sums})) {
        read.checks.push_back(sum.get<int64_t>());
      }
    }
    source.next[layer] = end;
    reads_.push_back(std::move(read));
  }
  return absl::OkStatus();
}

absl::Status Into::read(std::vector<KvMover::Posted>* posted) {
  AgentTransferId last;
  for (Read& read : reads_) {
    if (read.transfer != AgentTransferId{}) continue;
    const KvRun& mine = run(read.layer);
    const std::vector<int64_t> blocks(mine.blocks.begin(), mine.blocks.end());
    AgentKvRequest request;
    request.tokens = read.tokens;
    request.local.push_back({blocks, mine.first_block});
    request.remote.push_back({read.blocks, read.first_block});
    const auto& plan = sources_[read.from].theirs->passages[read.layer].plan;
    const absl::StatusOr<AgentTransferId> transfer = plan.make_transfer(cache_.agent, request);
    if (!transfer.ok()) return transfer.status();
    if (absl::Status good = cache_.agent.post(*transfer); !good.ok()) {
      cache_.agent.abandon(*transfer);
      return good;
    }
    read.transfer = last = *transfer;
    posted->push_back({*transfer, read.from});
  }
  // Most reads are over sooner than another thread wakes.
  const Time until = Clock::steady().now() + kDriven;
  while (last != AgentTransferId{} && Clock::steady().now() < until) {
    const absl::StatusOr<AgentTransferState> state = cache_.agent.state(last);
    if (!state.ok() || *state != AgentTransferState::kRunning) break;
  }
  return absl::OkStatus();
}

absl::Status Into::check(const Read& read) const {
  const KvRun& mine = run(read.layer);
  const Theirs::Passage& passage = sources_[read.from].theirs->passages[read.layer];
  std::vector<uint32_t> found;
  absl::Status good = passage.sums.add(Side::kTarget, cache_.layers[read.layer].placement.addresses,
                                       read.tokens, {mine.first_block, mine.blocks}, 0, found);
  if (!good.ok()) return good;
  // How many of the pieces that prefill reported lie before the wanted ones.
  const uint64_t before = read.tokens.begin / passage.sums.unit() -
                          read.first_block * passage.tokens / passage.sums.unit();
  if (before + found.size() > read.checks.size() ||
      !std::equal(found.begin(), found.end(),
                  read.checks.begin() + static_cast<ptrdiff_t>(before))) {
    return absl::DataLossError(absl::StrCat("layer ", read.layer,
                                            " has a wrong checksum in tokens ", read.tokens.begin,
                                            " to ", read.tokens.end));
  }
  return absl::OkStatus();
}

// --- both

class DirectMover : public KvMover {
 public:
  explicit DirectMover(Cache cache) : cache_(std::move(cache)) {}

  size_t layers() const override { return cache_.layers.size(); }
  absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                     const json& want) override {
    auto out = std::make_shared<Readers>();
    out->sums.resize(layers());
    const KvWorker& me = cache_.worker;
    const KvShare share{me.ranks, me.rank, rank_of(reader, ranks_in(want))};
    for (size_t i = 0; i < layers() && want.contains("kinds"); ++i) {
      const Layer& ours = cache_.layers[i];
      const json& packing = packing_in(want, i);
      const json& bytes = packing.at("bytes");
      const auto theirs = layer_of({0, bytes, 0, bytes, 1}, packing, cache_.said.at("identity"));
      if (!theirs.ok()) continue;  // the two do not fit, and decode says why
      auto sums = KvChecksums::make(ours.placement.layout, theirs->placement.layout, share);
      const bool whole = !sums.ok() || sums->unit() == 0 || sums->run_bytes() == ours.row.bytes;
      if (!whole) out->sums[i] = *std::move(sums);
    }
    return out;
  }
  json layout(const json& /*want*/,
              const absl::StatusOr<std::shared_ptr<const Reader>>& /*reader*/) override {
    return cache_.said;
  }
  std::unique_ptr<Kept> keep(size_t /*tokens*/) override {
    return std::make_unique<Blocks>(cache_);
  }
  absl::Status check(uint32_t layer, absl::Span<const uint32_t> blocks) const override {
    if (layer >= layers()) {
      return absl::InvalidArgumentError(absl::StrCat("the cache has no layer ", layer));
    }
    for (const uint32_t block : blocks) {
      if (block < cache_.layers[layer].row.count) continue;
      return absl::InvalidArgumentError(absl::StrCat("the cache has no block ", block));
    }
    return absl::OkStatus();
  }

  json about() const override { return cache_.want; }
  absl::StatusOr<std::shared_ptr<Source>> understand(const json& message) override;
  absl::StatusOr<std::shared_ptr<Source>> reach(const std::string& prefill,
                                                std::shared_ptr<Source> source,
                                                const std::shared_ptr<Source>& before) override;
  absl::StatusOr<std::unique_ptr<Incoming>> begin(std::vector<KvRun> runs,
                                                  size_t sources) override {
    if (runs.size() == cache_.groups) {
      return std::make_unique<Into>(cache_, std::move(runs), sources);
    }
    return absl::InvalidArgumentError(
        absl::StrCat(runs.size(), " runs of blocks for ", cache_.groups, " groups of layers"));
  }

 private:
  Cache cache_;
};

absl::StatusOr<std::shared_ptr<KvMover::Source>> DirectMover::understand(const json& message) {
  const json& identity = cache_.said.at("identity");
  if (message.at("identity") != identity) {
    return absl::FailedPreconditionError(
        absl::StrCat("it has another model or cache: ", message.at("identity").dump(), ", here ",
                     identity.dump()));
  }
  const json& rows = message.at("rows");
  if (rows.size() != layers()) {
    return absl::FailedPreconditionError(
        absl::StrCat("it has ", rows.size(), " layers, and here are ", layers()));
  }
  const bool named = message.contains("kinds");  // else its blocks are like ours
  const json theirs = message.value("kv", json()), ours = cache_.said.value("kv", json());
  if (!named && theirs.is_object() && ours.is_object() && theirs != ours) {
    return absl::FailedPreconditionError(absl::StrCat(
        "its blocks are laid out like ", theirs.dump(), ", and here like ", ours.dump()));
  }
  auto source = std::make_shared<Theirs>();
  source->said = message;
  source->ranks = ranks_in(message);
  for (size_t i = 0; i < layers(); ++i) {
    auto layer = layer_of(rows.at(i), packing_in(named ? message : cache_.said, i), identity);
    if (!layer.ok()) return layer.status();
    source->spans.push_back(*layer->row.span());
    source->layers.push_back(*std::move(layer));
  }
  return source;
}

absl::StatusOr<std::shared_ptr<KvMover::Source>> DirectMover::reach(
    const std::string& prefill, std::shared_ptr<Source> source,
    const std::shared_ptr<Source>& before) {
  auto& theirs = static_cast<Theirs&>(*source);
  if (before != nullptr && static_cast<Theirs&>(*before).said == theirs.said) return before;
  const KvShare share{theirs.ranks, rank_of(prefill, theirs.ranks), cache_.worker.rank};
  for (size_t i = 0; i < layers(); ++i) {
    const KvPlacement& here = cache_.layers[i].placement;
    const KvPlacement& there = theirs.layers[i].placement;
    auto plan = AgentKvPlan::make(cache_.agent, Op::kRead, here, prefill, there, share);
    if (!plan.ok()) return plan.status();
    if (!plan->complete()) {
      return absl::FailedPreconditionError(absl::StrCat("it does not have the heads that rank ",
                                                        share.rank, " of ", share.ranks, " has"));
    }
    auto sums = KvChecksums::make(there.layout, here.layout, share);
    if (!sums.ok()) return sums.status();
    theirs.passages.push_back({*std::move(plan), *std::move(sums), theirs.layers[i].tokens()});
  }
  return source;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvSession>> make_direct_session(std::string_view cache,
                                                               KvSessionOptions options) {
  try {
    json said = json::parse(cache);
    KvWorker& me = options.shard;
    me = {said.value("rank", 0U), said.value("ranks", 1U), said.value("heads", 1U),
          said.value("stage", 0U)};
    if (me.heads == 0 || me.rank >= me.ranks || me.ranks > kMostRanks) {
      return absl::InvalidArgumentError("rank is less than ranks, and heads are more than 0");
    }
    const auto lease = std::chrono::duration<double>(said.value("lease", 60.0));
    options.lease = std::chrono::duration_cast<Time>(std::min(lease, kLongestLease));
    const json groups = said.value("groups", json::array());
    for (const char* ours : {"rank", "heads", "stage", "lease", "groups"}) said.erase(ours);
    json want = said;
    want.erase("rows");
    Cache made{*options.agent, me, std::move(said), std::move(want)};
    const json& rows = made.said.at("rows");
    for (size_t i = 0; i < rows.size(); ++i) {
      auto layer = layer_of(rows.at(i), packing_in(made.said, i), made.said.at("identity"));
      if (!layer.ok()) return layer.status();
      if (!groups.empty()) layer->group = groups.at(i).get<uint16_t>();
      made.groups = std::max(made.groups, layer->group + 1);
      made.layers.push_back(*std::move(layer));
    }
    if (rows.empty()) return absl::InvalidArgumentError("a KV cache has at least one layer");
    absl::StatusOr<std::unique_ptr<KvSession>> session = KvSession::create(std::move(options));
    if (!session.ok()) return session;
    (*session)->use(std::make_unique<DirectMover>(std::move(made))).IgnoreError();  // its first
    return session;
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the cache as it is said: ", error.what()));
  }
}

}  // namespace baton::kvtransfer::session
