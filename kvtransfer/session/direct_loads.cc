// Decode's half of a direct session: reads into the cache, and their checks.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/session/direct_cache.h"

namespace baton::kvtransfer::session::direct {
namespace {

using Side = KvChecksums::Side;

constexpr Time kDriven = std::chrono::microseconds(500);  // for which reads are moved at once

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
  void plan(From& from);  // sets why_ where there is no route
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
  plan(from);
  if (!why_.ok()) return;
  for (uint32_t layer = 0; layer < cache_.layers.size(); ++layer) {
    if (!moves(from.routes->passages[layer])) from.here[layer].add(run(layer).tokens);
  }
}

void Into::plan(From& from) {
  const Theirs& theirs = *from.theirs;
  const KvShare share = from.share.value_or(
      KvShare{theirs.ranks, rank_of(theirs.agent, theirs.ranks), cache_.worker.rank});
  from.routes = theirs.routes.get(share, [&] {
    return routes_of(cache_, Op::kRead, theirs.agent, theirs.layers, share,
                     cache_.checks && theirs.checks);
  });
  const absl::Status& why = from.routes->why;
  if (why.ok()) return;
  why_ = absl::Status(why.code(), absl::StrCat("prefill ", theirs.agent, ": ", why.message()));
}

absl::Status Into::ready(size_t from, const json& parts) {
  From& source = sources_[from];
  plan(source);  // prefill may have come back since join(): see DirectMover::reach()
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

}  // namespace

std::unique_ptr<KvMover::Incoming> load_into(Cache& cache, std::vector<KvRun> runs,
                                             size_t sources) {
  return std::make_unique<Into>(cache, std::move(runs), sources);
}

}  // namespace baton::kvtransfer::session::direct
