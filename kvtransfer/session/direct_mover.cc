// Plans and checksums between two caches, a pair of them for each layer.
#include "kvtransfer/session/direct_mover.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/direct_cache.h"

namespace baton::kvtransfer::session {
namespace direct {
namespace {

constexpr std::chrono::duration<double> kLongestLease = std::chrono::hours(24 * 365);

class DirectMover : public KvMover {
 public:
  explicit DirectMover(Cache cache) : cache_(std::move(cache)) {}

  size_t layers() const override { return cache_.layers.size(); }
  absl::StatusOr<std::shared_ptr<const Reader>> meet(const std::string& reader,
                                                     const json& want) override {
    return meet_reader(cache_, reader, want);
  }
  json layout(const json& /*want*/,
              const absl::StatusOr<std::shared_ptr<const Reader>>& /*reader*/) override {
    return cache_.said;
  }
  absl::Status serves(const std::shared_ptr<const Reader>& reader, const json& want) override {
    return serves_reader(cache_, std::static_pointer_cast<const Readers>(reader), want);
  }
  std::unique_ptr<Kept> keep(size_t /*tokens*/) override { return keep_blocks(cache_); }
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
    return load_into(cache_, std::move(runs), sources);
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
  if (before != nullptr && static_cast<Theirs&>(*before).said == theirs.said) {
    static_cast<Theirs&>(*before).routes = {};  // plans belong to the agent that it was
    return before;
  }
  theirs.agent = prefill;
  return source;
}

// What make_direct_session() does; throws what nlohmann::json throws.
absl::StatusOr<std::unique_ptr<KvSession>> session_of(json said, KvSessionOptions options) {
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
}

}  // namespace
}  // namespace direct

absl::StatusOr<std::unique_ptr<KvSession>> make_direct_session(std::string_view cache,
                                                               KvSessionOptions options) {
  try {
    return direct::session_of(nlohmann::json::parse(cache), std::move(options));
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the cache as it is said: ", error.what()));
  }
}

std::unique_ptr<KvMover> make_direct_mover(Agent& agent, const KvPlacement& cache) {
  nlohmann::json said = {{"placement", absl::BytesToHexString(cache.encode())}, {"checks", false}};
  direct::Cache made{agent, {}, said, said, direct::layers_of(cache), cache.layout.groups.size(),
                     false};
  return std::make_unique<direct::DirectMover>(std::move(made));
}

}  // namespace baton::kvtransfer::session
