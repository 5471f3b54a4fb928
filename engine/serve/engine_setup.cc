// Making an engine: limits, cache memory, workspace; and looking into it from outside.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/serve/engine.h"

namespace baton::engine::serve {

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      break;
  }
  return "error";
}

Engine::Engine(const Model& model, const Tokenizer& tokenizer, EngineOptions options)
    : model_(model),
      tokenizer_(tokenizer),
      options_(std::move(options)),
      clock_(options_.clock != nullptr ? *options_.clock : Clock::steady()),
      liveness_(clock_),
      pool_(options_.runner == nullptr ? options_.threads : 1),
      max_context_(options_.limits().max_context(model)),
      blocks_(options_.blocks),
      scheduler_({options_.token_budget, options_.max_sequences, options_.prefix_cache,
                  model_root(model.fingerprint())},
                 blocks_),
      hook_(options_.timeline, clock_, liveness_) {}

Engine::~Engine() {
  if (options_.hand_off != nullptr) options_.hand_off->close();  // it reads and writes the cache
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::create(const Model& model,
                                                       const Tokenizer& tokenizer,
                                                       EngineOptions options) {
  if (options.blocks < 1 || options.max_sequences < 1 ||
      options.token_budget < options.max_sequences) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an engine needs blocks (", options.blocks, " given), sequences (", options.max_sequences,
        ") and a token budget (", options.token_budget, ") of at least one token per sequence"));
  }
  if (model.shard().whole() != (options.leader == nullptr)) {
    return absl::InvalidArgumentError(
        "a model in several parts needs EngineOptions::leader; a whole model must not have it");
  }
  if (options.leader != nullptr && options.tiers.wanted() != options.leader->has_tiers()) {
    return absl::InvalidArgumentError(
        "KV tiers (--kv-host-mib, --kv-disk, --kv-store) are there at all tensor-parallel ranks or "
        "at none: give Leader::create() what EngineOptions::tiers says of rank 0");
  }
  if (options.runner != nullptr && options.leader != nullptr) {
    return absl::UnimplementedError(
        "a device's KV cache cannot be shared out over tensor-parallel ranks yet: use one rank, or "
        "compute with --device cpu");
  }
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tokenizer has ", tokenizer.vocab_size(), " tokens, the model only ",
                     model.config().vocab_size, ": they do not belong together"));
  }
  std::unique_ptr<Engine> engine(new Engine(model, tokenizer, std::move(options)));
  if (absl::Status status = engine->start(); !status.ok()) return status;
  return engine;
}

absl::Status Engine::start() {
  runner_ = options_.runner;
  if (runner_ == nullptr) {
    runner_ = &cpu_.emplace(model_, pool_,
                            options_.leader != nullptr ? &options_.leader->exchange() : nullptr);
  }
  absl::StatusOr<shard::KvMemory> memory =
      shard::KvMemory::make(model_, options_.blocks, runner_, options_.hand_off != nullptr);
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  absl::Status status = runner_->prepare(options_.limits().workspace(model_));
  if (!status.ok()) return status;
  logits_.resize(options_.max_sequences * model_.config().vocab_size);
  if (status = start_sessions(); !status.ok()) return status;
  return start_tiers();
}

absl::Status Engine::start_tiers() {
  if (!options_.tiers.wanted()) return absl::OkStatus();
  if (!options_.prefix_cache) {
    return absl::InvalidArgumentError("KV tiers need the prefix cache: turn it on");
  }
  absl::StatusOr<std::unique_ptr<KvTiers>> tiers =
      KvTiers::open(options_.tiers, model_, options_.leader, memory_->cache(), blocks_, clock_);
  if (!tiers.ok()) return tiers.status();
  tiers_ = *std::move(tiers);
  tier_loads_.emplace(RemoteLoadOptions{.layers = static_cast<uint32_t>(model_.config().num_layers),
                                        .timeout = options_.tiers.timeout},
                      *tiers_, blocks_);
  scheduler_.use_tiers(*tiers_, *tier_loads_);
  return absl::OkStatus();
}

bool Engine::has_work() const {
  return !scheduler_.empty() || (loads_ && !loads_->quiet()) ||
         (tiers_ != nullptr && (tiers_->busy() || !tier_loads_->quiet()));
}

EngineStats Engine::stats() const {
  EngineStats stats = stats_;
  stats.waiting = scheduler_.waiting();
  stats.running = scheduler_.running();
  stats.loading = scheduler_.loading().size();
  stats.blocks = options_.blocks;
  stats.free_blocks = blocks_.free_blocks();
  stats.quarantined_blocks = blocks_.quarantined_blocks();
  stats.cached_blocks = blocks_.cached_blocks();
  if (tiers_ != nullptr) {
    stats.tiers = tiers_->stats();
    stats.tiers.dropped += tiers_->dropped();
  }
  return stats;
}

Backlog Engine::backlog() const {
  return {.requests = requests_.size() - asks_,
          .unbegun = unbegun_,
          .waiting = scheduler_.waiting(),
          .places = options_.max_sequences};
}

absl::Status Engine::check_integrity() const {
  uint64_t references = tiers_ != nullptr ? tiers_->references() : 0;
  for (const auto& [send, blocks] : held_) references += blocks.size();
  for (const auto& [id, sequence] : requests_) references += sequence->blocks.size();
  return blocks_.check_integrity(references);
}

}  // namespace baton::engine::serve
