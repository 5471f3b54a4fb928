// Plans and checksums between two caches, a pair of them for each layer.
#include "kvtransfer/session/direct_mover.h"

#include <zlib.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
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

// A fraction or a negative number is none: json would round it.
uint64_t number_in(const json& value) {
  if (value.is_number_integer() && value >= 0) return value.get<uint64_t>();
  return value.get_ref<const json::number_unsigned_t&>();  // throws
}

struct Layer {
  KvPlacement placement;  // of this layer alone, number 0 of its layout
  uint32_t number = 0;    // the model's
  size_t group = 0;
  StridedDescriptor row;  // where it is said as one
  uint32_t tokens() const { return placement.layout.groups[0].block_tokens; }  // of a block
  uint32_t blocks() const { return placement.layout.groups[0].blocks; }
  MemoryKind kind() const {
    const bool device = placement.layout.buffers[0].device == KvDevice::kCuda;
    return device ? MemoryKind::kVram : MemoryKind::kDram;
  }
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
  bool checks = true;
};

const json& packing_in(const json& message, size_t layer) {
  return message.at("kinds").at(message.at("layers").at(layer).get<size_t>());
}

// Checksums are taken by this process of its own memory: not of a device's.
bool checks_in(const json& message) { return message.value("checks", json()) != false; }

absl::StatusOr<Layer> layer_of(const json& row, const json& packing, const json& identity,
                               MemoryKind kind) {
  Layer out;
  out.row = {number_in(row.at(0)), number_in(row.at(1)), number_in(row.at(2)), number_in(row.at(3)),
             number_in(row.at(4))};
  const std::optional<Descriptor> span = out.row.span();
  if (!span.has_value() || out.row.count > UINT32_MAX) {
    return absl::InvalidArgumentError("a row of a cache covers nothing, or too much");
  }
  KvGroup group;
  group.layers = {0};
  group.blocks = static_cast<uint32_t>(out.row.count);
  absl::StatusOr<KvPlacement> placed =
      place_packed(packing.dump(), group, absl::MakeConstSpan(&*span, 1), out.row.stride, kind);
  if (!placed.ok()) return placed.status();
  out.placement = *std::move(placed);
  out.placement.layout.model.weights = identity.get<std::string>();
  return out;
}

// The layers of a placement, each alone, in the order of their numbers.
std::vector<Layer> layers_of(const KvPlacement& whole) {
  std::vector<Layer> layers;
  for (size_t g = 0; g < whole.layout.groups.size(); ++g) {
    const KvGroup& group = whole.layout.groups[g];
    for (size_t i = 0; i < group.layers.size(); ++i) {
      Layer& layer = layers.emplace_back();
      layer.number = group.layers[i];
      layer.group = g;
      KvLayout& one = layer.placement.layout;
      one.format = whole.layout.format;
      one.model = whole.layout.model;
      one.groups.push_back(group);
      one.groups[0].layers = {0};
      std::vector<uint32_t> used;
      for (KvField& field : one.groups[0].fields) {
        KvPlace place = field.places[i];
        const auto known = std::find(used.begin(), used.end(), place.buffer);
        const auto at = static_cast<uint32_t>(known - used.begin());
        if (known == used.end()) {
          used.push_back(place.buffer);
          one.buffers.push_back(whole.layout.buffers[place.buffer]);
          layer.placement.addresses.push_back(whole.addresses[place.buffer]);
        }
        place.buffer = at;
        field.places = {place};
      }
    }
  }
  std::sort(layers.begin(), layers.end(),
            [](const Layer& a, const Layer& b) { return a.number < b.number; });
  return layers;
}

// What a message says of a cache: rows of blocks, a packing for each; or a placement.
absl::StatusOr<std::vector<Layer>> layers_in(const json& message, const json& packings) {
  if (message.contains("placement")) {
    const auto whole =
        KvPlacement::decode(absl::HexStringToBytes(message["placement"].get<std::string>()));
    if (!whole.ok()) return whole.status();
    return layers_of(*whole);
  }
  std::vector<Layer> layers;
  const bool device = message.value("device", json()) == true;
  for (const json& row : message.at("rows")) {
    auto layer = layer_of(row, packing_in(packings, layers.size()), message.at("identity"),
                          device ? MemoryKind::kVram : MemoryKind::kDram);
    if (!layer.ok()) return layer.status();
    layer->number = static_cast<uint32_t>(layers.size());
    layers.push_back(*std::move(layer));
  }
  return layers;
}

// The tensor-parallel rank of worker agent/k in an engine with `ranks` of them.
uint32_t rank_of(absl::string_view agent, uint32_t ranks) {
  uint32_t number = 0;
  const bool said = absl::SimpleAtoi(agent.substr(agent.rfind('/') + 1), &number);
  return said && ranks > 0 ? number % ranks : 0;
}

uint32_t ranks_in(const json& message) { return message.value("ranks", json(1)).get<uint32_t>(); }

std::string heads_text(const KvLayout& layout) {
  const KvGroup& group = layout.groups[0];
  return absl::StrCat("[", group.first_head, ", ", group.first_head + group.heads, ")");
}

// That the source has all that it owes.
absl::Status check_complete(const KvPlan& plan, const KvShare& share) {
  if (plan.complete()) return absl::OkStatus();
  const std::string which = share.ranks > 1 ? absl::StrCat("as rank ", share.rank, " of ",
                                                           share.ranks, " it should send others; ")
                                            : "";
  return absl::FailedPreconditionError(
      absl::StrCat("this prefill worker holds KV heads ", heads_text(plan.source()), " but ", which,
                   "the decode worker needs ", heads_text(plan.target()),
                   ": ask one that holds them all, or all workers of its group"));
}

// From a layer of prefill's to the same one of decode's.
struct Passage {
  std::optional<AgentKvPlan> plan;
  std::optional<KvChecksums> sums;
};

absl::StatusOr<Passage> passage(Agent& agent, Op op, const Layer& here, const std::string& other,
                                const Layer& there, const KvShare& share, bool checks) {
  Passage out;
  const bool write = op == Op::kWrite;
  auto plan = AgentKvPlan::make(agent, op, here.placement, other, there.placement, share);
  if (!plan.ok()) return plan.status();
  if (absl::Status good = check_complete(plan->plan(), share); !good.ok()) return good;
  out.plan = *std::move(plan);
  if (!checks) return out;
  const KvLayout& source = (write ? here : there).placement.layout;
  const KvLayout& target = (write ? there : here).placement.layout;
  auto sums = KvChecksums::make(source, target, share);
  if (!sums.ok()) return sums.status();
  out.sums = *std::move(sums);
  return out;
}

bool moves(const Passage& one) {
  const KvPlan& plan = one.plan->plan();
  return !plan.parts().empty() && !plan.parts()[0].boxes.empty();
}

// All passages between two caches, for one share of the heads.
struct Routes {
  std::vector<Passage> passages;   // of each layer of `from`, or `into`: that of this process
  std::vector<uint32_t> layer_of;  // of each layer there: which it is here; UINT32_MAX: none
  absl::Status why;                // there can be none
};

// Of the routes to one peer, those that were made already.
class KnownRoutes {
 public:
  std::shared_ptr<const Routes> get(const KvShare& share, absl::FunctionRef<Routes()> make) {
    for (const auto& [known, routes] : known_) {
      if (known == share) return routes;
    }
    auto made = std::make_shared<const Routes>(make());
    if (!made->why.ok()) return made;  // the other's memory may not be known yet
    if (known_.size() == kMost) known_.clear();
    return known_.emplace_back(share, std::move(made)).second;
  }

 private:
  static constexpr size_t kMost = 16;
  std::vector<std::pair<KvShare, std::shared_ptr<const Routes>>> known_;
};

// Between the layers of `ours` and those of `theirs` that have the same number. Decode needs all of
// its layers.
Routes routes_of(Cache& ours, Op op, const std::string& agent, const std::vector<Layer>& theirs,
                 const KvShare& share, bool checks) {
  Routes out;
  out.layer_of.assign(theirs.size(), UINT32_MAX);
  size_t found = 0;
  for (uint32_t here = 0; here < ours.layers.size(); ++here) {
    Passage& one = out.passages.emplace_back();
    const auto there = std::find_if(theirs.begin(), theirs.end(), [&](const Layer& each) {
      return each.number == ours.layers[here].number;
    });
    if (there == theirs.end()) continue;
    ++found;
    out.layer_of[static_cast<size_t>(there - theirs.begin())] = here;
    auto made = passage(ours.agent, op, ours.layers[here], agent, *there, share, checks);
    out.why = made.status();
    if (!made.ok()) return out;
    one = *std::move(made);
  }
  if (found < (op == Op::kRead ? ours.layers.size() : theirs.size())) {
    out.why = absl::FailedPreconditionError(
        "this prefill worker does not hold all layers of the decode worker: ask one that does");
  }
  return out;
}

// --- prefill

struct Readers : KvMover::Reader {
  std::string agent;
  std::vector<Layer> layers;  // of its cache, where it says where that lies
  bool checks = true;
  // For each layer, how to take the checksums of what it reads; none: those of whole blocks.
  std::vector<std::optional<KvChecksums>> sums;
  mutable KnownRoutes routes, fits;  // fits: only whether there could be any
};

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
      : kept_(of), reader_(std::move(its)), transfer_(want.at("transfer").get<std::string>()) {
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
    const json message = {
        {"kind", "wrote"},
        {"transfer", transfer_},
        {"parts", {{wanted.layer, next_tokens_.begin, std::move(sums), next_tokens_.end}}}};
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
  const std::string transfer_;
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

// --- decode

struct Theirs : KvMover::Source {
  json said;
  std::string agent;
  std::vector<Layer> layers;
  bool checks = true;
  mutable KnownRoutes routes;
};

// Tokens that are here, in ranges that do not touch.
class Here {
 public:
  void add(KvTokens tokens) {
    for (auto it = ranges_.begin(); it != ranges_.end();) {
      if (it->end < tokens.begin || it->begin > tokens.end) {
        ++it;
        continue;
      }
      tokens = {std::min(tokens.begin, it->begin), std::max(tokens.end, it->end)};
      it = ranges_.erase(it);
    }
    ranges_.push_back(tokens);
  }
  bool has(KvTokens tokens) const {
    return tokens.empty() || std::any_of(ranges_.begin(), ranges_.end(), [&](const KvTokens& each) {
             return each.begin <= tokens.begin && each.end >= tokens.end;
           });
  }

 private:
  std::vector<KvTokens> ranges_;
};

// A load, from the workers of a prefill.
class Into : public KvMover::Incoming {
 public:
  Into(Cache& cache, std::vector<KvRun> runs, size_t sources)
      : cache_(cache), runs_(std::move(runs)), sources_(sources) {
    for (From& from : sources_) {
      from.here.resize(cache_.layers.size());
      for (const Layer& layer : cache_.layers) {
        from.next.push_back(runs_[layer.group].tokens.begin);
      }
    }
  }

  void take_share(size_t from, const KvShare& share) override { sources_[from].share = share; }
  void join(size_t from, std::shared_ptr<const KvMover::Source> source) override;
  absl::Status ready(size_t from, const json& parts) override;
  absl::Status wrote(size_t from, const json& parts) override;
  absl::Status read(std::vector<KvMover::Posted>* posted) override;
  absl::Status landed(AgentTransferId read, bool wanted) override {
    const auto it = std::find_if(reads_.begin(), reads_.end(),
                                 [read](const Read& each) { return each.transfer == read; });
    absl::Status good;
    const Passage& one = sources_[it->from].routes->passages[it->layer];
    if (wanted && one.sums.has_value()) {
      good = check(one, it->layer, it->tokens, it->checks,
                   it->tokens.begin / one.sums->unit() -
                       it->first_block * it->block_tokens / one.sums->unit());
      if (good.ok()) sources_[it->from].here[it->layer].add(it->tokens);
    } else if (wanted) {
      sources_[it->from].doubtful.push_back({it->layer, it->tokens, std::nullopt});
    }
    reads_.erase(it);
    return good;
  }
  void held(size_t from, Time until, Time now) override {
    std::erase_if(sources_[from].doubtful, [&](Doubtful& each) {
      if (!each.ended.has_value()) each.ended = now;
      if (*each.ended > until) return false;
      sources_[from].here[each.layer].add(each.tokens);
      return true;
    });
  }
  bool doubts(size_t from) const override { return !sources_[from].doubtful.empty(); }
  uint32_t layers() const override {
    uint32_t layer = 0;
    while (layer < cache_.layers.size() && is_here(layer, run(layer).tokens)) ++layer;
    return layer;
  }
  uint64_t bytes(uint32_t layer) const override {
    const KvGroup& group = cache_.layers[layer].placement.layout.groups[0];
    const KvTokens tokens = run(layer).tokens;
    if (tokens.empty()) return 0;
    uint64_t bytes = 0;
    for (const KvField& field : group.fields) {
      const uint64_t rows = field.per_block ? (tokens.end - 1) / group.block_tokens + 1 -
                                                  tokens.begin / group.block_tokens
                                            : tokens.end - tokens.begin;
      bytes += rows * group.heads * field.token_bytes();
    }
    return bytes;
  }
  bool complete() const override { return layers() == cache_.layers.size(); }
  std::vector<uint32_t> missing() const override;
  bool exact() const override { return true; }  // it is the same cache, by its identity

 private:
  struct Doubtful {
    uint32_t layer = 0;
    KvTokens tokens;
    std::optional<Time> ended;
  };
  struct From {
    std::shared_ptr<const Theirs> theirs;
    std::optional<KvShare> share;
    std::shared_ptr<const Routes> routes;
    std::vector<uint64_t> next;      // of each layer, the first token that was not asked for
    std::vector<Here> here;          // of each layer
    std::vector<Doubtful> doubtful;  // read without a checksum, not known to have been held
  };
  // Reads `tokens` out of a worker's `blocks`, the first of which is its number first_block.
  struct Read {
    size_t from = 0;
    uint32_t layer = 0;
    uint64_t first_block = 0, block_tokens = 0;
    KvTokens tokens;
    std::vector<int64_t> blocks;
    std::vector<int64_t> checks;  // of each block, or of each piece of them
    AgentTransferId transfer;
  };

  const KvRun& run(uint32_t layer) const { return runs_[cache_.layers[layer].group]; }
  bool is_here(uint32_t layer, KvTokens tokens) const {
    return std::all_of(sources_.begin(), sources_.end(),
                       [&](const From& from) { return from.here[layer].has(tokens); });
  }
  absl::Status check(const Passage& one, uint32_t layer, KvTokens tokens,
                     absl::Span<const int64_t> told, uint64_t before) const;

  Cache& cache_;
  const std::vector<KvRun> runs_;
  std::vector<From> sources_;
  std::vector<Read> reads_;
  absl::Status why_;
};

// Where nothing goes from what a worker has into what is here, that is here already.
void Into::join(size_t number, std::shared_ptr<const KvMover::Source> source) {
  From& from = sources_[number];
  from.theirs = std::static_pointer_cast<const Theirs>(source);
  const Theirs& theirs = *from.theirs;
  const KvShare share = from.share.value_or(
      KvShare{theirs.ranks, rank_of(theirs.agent, theirs.ranks), cache_.worker.rank});
  from.routes = theirs.routes.get(share, [&] {
    return routes_of(cache_, Op::kRead, theirs.agent, theirs.layers, share,
                     cache_.checks && theirs.checks);
  });
  if (!from.routes->why.ok()) {
    why_ = absl::Status(from.routes->why.code(),
                        absl::StrCat("prefill ", theirs.agent, ": ", from.routes->why.message()));
    return;
  }
  for (uint32_t layer = 0; layer < cache_.layers.size(); ++layer) {
    if (!moves(from.routes->passages[layer])) from.here[layer].add(run(layer).tokens);
  }
}

absl::Status Into::ready(size_t from, const json& parts) {
  From& source = sources_[from];
  if (!why_.ok()) return why_;
  for (const json& part : parts) {
    const auto row = part.at(0).get<uint32_t>();
    const auto first = part.at(1).get<uint64_t>();
    if (row >= source.routes->layer_of.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prefill reports that layer ", row, " is ready"));
    }
    const uint32_t layer = source.routes->layer_of[row];
    if (layer == UINT32_MAX) continue;
    const uint64_t size = source.theirs->layers[row].tokens(), begin = source.next[layer];
    if (first > UINT32_MAX) return absl::InvalidArgumentError("prefill has no such block");
    const uint64_t end = std::min((first + part.at(2).size()) * size, run(layer).tokens.end);
    if (!moves(source.routes->passages[layer]) || begin >= end) continue;
    if (begin < first * size) {
      // Both sides keep a window in whole blocks: an engine gives ours to other prompts.
      return absl::FailedPreconditionError(
          absl::StrCat("prefill does not keep token ", begin, " of layer ", layer,
                       "'s window: give it blocks that are not smaller than these here"));
    }
    Read read{from, layer, first, size, {begin, end}, {}, {}, {}};
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

absl::Status Into::wrote(size_t from, const json& parts) {
  From& source = sources_[from];
  if (!why_.ok()) return why_;
  for (const json& part : parts) {
    const auto layer = part.at(0).get<uint32_t>();
    const KvTokens tokens{part.at(1).get<uint64_t>(), part.at(3).get<uint64_t>()};
    if (layer >= cache_.layers.size() || tokens.empty() || tokens.begin < run(layer).tokens.begin ||
        tokens.end > run(layer).tokens.end) {
      return absl::InvalidArgumentError(absl::StrCat("prefill wrote tokens [", tokens.begin, ", ",
                                                     tokens.end, ") of layer ", layer,
                                                     ", which were not asked for"));
    }
    const auto sums = part.at(2).get<std::vector<int64_t>>();
    const Passage& one = source.routes->passages[layer];
    if (one.sums.has_value() && !sums.empty()) {  // prefill may take none
      absl::Status good = check(one, layer, tokens, sums, 0);
      if (!good.ok()) return good;
    }
    source.here[layer].add(tokens);
  }
  return absl::OkStatus();
}

absl::Status Into::read(std::vector<KvMover::Posted>* posted) {
  AgentTransferId last;
  if (!why_.ok()) return why_;
  for (Read& read : reads_) {
    if (read.transfer != AgentTransferId{}) continue;
    const KvRun& mine = run(read.layer);
    const std::vector<int64_t> blocks(mine.blocks.begin(), mine.blocks.end());
    AgentKvRequest request;
    request.tokens = read.tokens;
    request.local.push_back({blocks, mine.first_block});
    request.remote.push_back({read.blocks, read.first_block});
    const AgentKvPlan& plan = *sources_[read.from].routes->passages[read.layer].plan;
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

// `told`: the checksums of pieces, of which the first `before` lie in front of the tokens.
absl::Status Into::check(const Passage& one, uint32_t layer, KvTokens tokens,
                         absl::Span<const int64_t> told, uint64_t before) const {
  const KvRun& mine = run(layer);
  std::vector<uint32_t> found;
  absl::Status good = one.sums->add(Side::kTarget, cache_.layers[layer].placement.addresses, tokens,
                                    {mine.first_block, mine.blocks}, 0, found);
  if (!good.ok()) return good;
  if (before + found.size() <= told.size() &&
      std::equal(found.begin(), found.end(), told.begin() + static_cast<ptrdiff_t>(before))) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("layer ", layer, " has a wrong checksum in tokens ",
                                          tokens.begin, " to ", tokens.end));
}

std::vector<uint32_t> Into::missing() const {
  std::vector<uint32_t> out;
  for (size_t group = 0; group < runs_.size(); ++group) {
    const KvRun& mine = runs_[group];
    for (size_t i = 0; i < mine.blocks.size(); ++i) {
      bool here = true;
      for (uint32_t layer = 0; layer < cache_.layers.size() && here; ++layer) {
        if (cache_.layers[layer].group != group) continue;
        const uint64_t size = cache_.layers[layer].tokens();
        const uint64_t begin = (mine.first_block + i) * size;
        here = is_here(
            layer, {std::max(begin, mine.tokens.begin), std::min(begin + size, mine.tokens.end)});
      }
      if (!here) out.push_back(mine.blocks[i]);
    }
  }
  return out;
}

// --- both

class DirectMover : public KvMover {
 public:
  explicit DirectMover(Cache cache) : cache_(std::move(cache)) {}

  size_t layers() const override { return cache_.layers.size(); }
  absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                     const json& want) override {
    auto out = std::make_shared<Readers>();
    out->agent = reader;
    out->checks = cache_.checks && checks_in(want);
    out->sums.resize(layers());
    if (want.contains("placement") || want.contains("rows")) {
      auto theirs = layers_in(want, want);
      if (!theirs.ok()) return theirs.status();
      out->layers = *std::move(theirs);
    }
    const json model = cache_.said.value("model", json());
    if (model.is_string() && model != "" && want.value("model", json()) == model) {
      // One of another make names its checkpoint as we do.
      for (Layer& layer : out->layers) {
        layer.placement.layout.model = cache_.layers[0].placement.layout.model;
      }
    }
    if (!out->checks) return out;
    const KvWorker& me = cache_.worker;
    const KvShare share{me.ranks, me.rank, rank_of(reader, ranks_in(want))};
    for (size_t i = 0; i < layers() && want.contains("kinds"); ++i) {
      const Layer& ours = cache_.layers[i];
      const json& packing = packing_in(want, i);
      const json& bytes = packing.at("bytes");
      const auto theirs =
          layer_of({0, bytes, 0, bytes, 1}, packing, cache_.said.at("identity"), MemoryKind::kDram);
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
  absl::Status serves(const std::shared_ptr<const Reader>& reader, const json& want) override {
    const Blocks none(cache_);
    return Shown(none, std::static_pointer_cast<const Readers>(reader), want).fits();
  }
  std::unique_ptr<Kept> keep(size_t /*tokens*/) override {
    return std::make_unique<Blocks>(cache_);
  }
  absl::Status check(uint32_t layer, absl::Span<const uint32_t> blocks) const override {
    if (layer >= layers()) {
      return absl::InvalidArgumentError(absl::StrCat("the cache has no layer ", layer));
    }
    for (const uint32_t block : blocks) {
      if (block < cache_.layers[layer].blocks()) continue;
      return absl::InvalidArgumentError(absl::StrCat("the cache has no block ", block));
    }
    return absl::OkStatus();
  }

  json about() const override { return cache_.want; }
  json about_blocks() const override {
    json out = {{"groups", json::array()}};
    for (const Layer& layer : cache_.layers) out["groups"].push_back(layer.group);
    if (cache_.said.contains("rows")) out["rows"] = cache_.said["rows"];
    return out;
  }
  absl::StatusOr<std::shared_ptr<Source>> understand(const json& message) override;
  absl::StatusOr<std::shared_ptr<Source>> reach(const std::string& prefill,
                                                std::shared_ptr<Source> source,
                                                const std::shared_ptr<Source>& before) override;
  absl::StatusOr<std::unique_ptr<Incoming>> begin(std::vector<KvRun> runs, size_t sources,
                                                  KvRequestId /*id*/) override {
    if (runs.size() != cache_.groups) {
      return absl::InvalidArgumentError(
          absl::StrCat(runs.size(), " runs of blocks for ", cache_.groups, " groups of layers"));
    }
    for (const Layer& layer : cache_.layers) {
      if (absl::Status good = check(layer, runs[layer.group]); !good.ok()) return good;
    }
    return std::make_unique<Into>(cache_, std::move(runs), sources);
  }

 private:
  // That its blocks are in the cache, and hold its tokens.
  static absl::Status check(const Layer& layer, const KvRun& run) {
    for (const uint32_t block : run.blocks) {
      if (block < layer.blocks()) continue;
      return absl::InvalidArgumentError(absl::StrCat("the cache has no block ", block));
    }
    const uint64_t size = layer.tokens(), last = run.first_block + run.blocks.size();
    const bool good = run.first_block <= UINT32_MAX && run.tokens.begin <= run.tokens.end &&
                      run.tokens.begin / size >= run.first_block && run.tokens.end <= last * size;
    if (good || run.tokens.empty()) {
      if (run.tokens.begin <= run.tokens.end) return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("blocks ", run.first_block, " to ", last, " of ",
                                                   size, " tokens do not hold tokens ",
                                                   run.tokens.begin, " to ", run.tokens.end));
  }

  Cache cache_;
};

absl::StatusOr<std::shared_ptr<KvMover::Source>> DirectMover::understand(const json& message) {
  const bool placed = cache_.said.contains("placement");
  if (placed != message.contains("placement")) {
    return absl::FailedPreconditionError(
        "it is a connector, and this is not, or the other way round: use the same calls at both "
        "ends");
  }
  json packings = message;
  if (!placed) {
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
    if (!named) packings = cache_.said;
  }
  auto source = std::make_shared<Theirs>();
  source->ranks = ranks_in(message);
  source->checks = checks_in(message);
  auto layers = layers_in(message, packings);
  if (!layers.ok()) return layers.status();
  source->layers = *std::move(layers);
  for (const Layer& layer : source->layers) {
    const KvPlacement& place = layer.placement;
    for (size_t i = 0; i < place.addresses.size(); ++i) {
      const KvBuffer& buffer = place.layout.buffers[i];
      const Descriptor span{place.addresses[i], buffer.bytes, buffer.device_index};
      const auto& known = source->spans;
      if (std::find(known.begin(), known.end(), span) == known.end()) source->spans.push_back(span);
    }
    source->kind = layer.kind();
  }
  source->said = message;
  return source;
}

absl::StatusOr<std::shared_ptr<KvMover::Source>> DirectMover::reach(
    const std::string& prefill, std::shared_ptr<Source> source,
    const std::shared_ptr<Source>& before) {
  auto& theirs = static_cast<Theirs&>(*source);
  if (before != nullptr && static_cast<Theirs&>(*before).said == theirs.said) return before;
  theirs.agent = prefill;
  return source;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvSession>> make_direct_session(std::string_view cache,
                                                               KvSessionOptions options) {
  try {
    json said = json::parse(cache);
    KvWorker& me = options.shard;
    const auto number = [&](const char* name, uint64_t otherwise) {
      return said.contains(name) ? number_in(said[name]) : otherwise;
    };
    const uint64_t rank = number("rank", 0), ranks = number("ranks", 1), stage = number("stage", 0);
    me = {static_cast<uint32_t>(rank), static_cast<uint32_t>(ranks),
          static_cast<uint32_t>(std::min<uint64_t>(number("heads", 1), UINT32_MAX)),
          static_cast<uint32_t>(stage)};
    if (me.heads == 0 || rank >= ranks || ranks > kMostRanks || stage > UINT16_MAX) {
      return absl::InvalidArgumentError("rank is less than ranks, and heads are more than 0");
    }
    const std::chrono::duration<double> lease(said.value("lease", 60.0));
    options.lease = std::chrono::duration_cast<Time>(
        std::clamp(lease, std::chrono::duration<double>{}, kLongestLease));
    const json groups = said.value("groups", json::array());
    for (const char* ours : {"rank", "heads", "stage", "lease", "groups"}) said.erase(ours);
    if (said.value("device", json()) == true) said["checks"] = false;
    json want = said;
    want.erase("rows");
    const bool checks = checks_in(said);
    Cache made{*options.agent, me, std::move(said), std::move(want), {}, 0, checks};
    auto layers = layers_in(made.said, made.said);
    if (!layers.ok()) return layers.status();
    made.layers = *std::move(layers);
    for (size_t i = 0; i < made.layers.size(); ++i) {
      if (!groups.empty())
        made.layers[i].group = std::min<uint64_t>(number_in(groups.at(i)), UINT16_MAX);
      made.groups = std::max(made.groups, made.layers[i].group + 1);
    }
    if (made.layers.empty()) return absl::InvalidArgumentError("a KV cache has at least one layer");
    absl::StatusOr<std::unique_ptr<KvSession>> session = KvSession::create(std::move(options));
    if (!session.ok()) return session;
    (*session)->use(std::make_unique<DirectMover>(std::move(made))).IgnoreError();  // its first
    return session;
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the cache as it is said: ", error.what()));
  }
}

std::unique_ptr<KvMover> make_direct_mover(Agent& agent, const KvPlacement& cache) {
  json said = {{"placement", absl::BytesToHexString(cache.encode())}, {"checks", false}};
  Cache made{agent, {}, said, said, layers_of(cache), cache.layout.groups.size(), false};
  return std::make_unique<DirectMover>(std::move(made));
}

}  // namespace baton::kvtransfer::session
