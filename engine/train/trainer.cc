// The training step: micro-batches, sums over ranks, update; and evaluation.
#include "engine/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_format.h"
#include "transport/clock.h"

namespace baton::engine::train {

namespace {

constexpr size_t kTask = 16384;  // elements that one thread adds at a time

// target += source, over [begin, end).
void add(ComputePool& pool, size_t begin, size_t end, const float* source, float* target) {
  const auto tasks = static_cast<int64_t>((end - begin + kTask - 1) / kTask);
  pool.parallel_for(tasks, [&](int64_t task, int) {
    const size_t from = begin + static_cast<size_t>(task) * kTask;
    const size_t to = std::min(end, from + kTask);
    for (size_t i = from; i < to; ++i) target[i] += source[i];
  });
}

// What lies at the place in the flat array, for people.
std::string label(const ParameterMap& map, size_t place) {
  if (place >= map.embedding.offset) return "embedding";
  for (size_t l = 0; l < map.layers.size(); ++l) {
    if (place >= map.layers[l].down.offset) return absl::StrFormat("layer %u", l);
  }
  return "head";
}

absl::Status check_parallel(const TrainerOptions& options, int ranks) {
  const ParallelOptions& parallel = options.parallel;
  if (parallel.accumulate < 1 || parallel.groups < 0 || (ranks > 1 && parallel.groups > 0)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d micro-batches in %d groups on %d ranks: there must be at least one micro-batch, and "
        "only one rank alone can stand for several groups",
        parallel.accumulate, parallel.groups, ranks));
  }
  const int micro_batches = parallel.accumulate * std::max({1, ranks, parallel.groups});
  for (int length : {options.length, options.long_length}) {
    if (options.batch_tokens / length % micro_batches != 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%d micro-batches (ranks times --accumulate) do not divide the %d sequences of %d tokens "
          "in a batch",
          micro_batches, options.batch_tokens / length, length));
    }
  }
  if (parallel.wire != DataType::kF32 && parallel.wire != DataType::kBF16) {
    return absl::InvalidArgumentError("gradients travel as f32 or bf16 only");
  }
  if (parallel.zero != 0 && parallel.zero != 1) {
    return absl::InvalidArgumentError("only ZeRO stages 0 and 1 exist here");
  }
  return absl::OkStatus();
}

// The backward pass knows a Llama without biases, norms of heads and windows.
absl::Status check_plain(const ModelConfig& model) {
  const std::pair<bool, const char*> foreign[] = {
      {model.num_experts > 0, "experts"},
      {model.has_qk_norm(), "norms of query and key heads"},
      {model.has_qkv_bias() || model.has_output_bias(), "attention biases"},
      {model.mlp_bias, "biases of the feed-forward layers"},
      {model.sliding_window > 0, "a sliding window"}};
  for (const auto& [there, what] : foreign) {
    if (!there) continue;
    return absl::InvalidArgumentError(absl::StrFormat("a model with %s cannot be trained", what));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(const TrainerOptions& options,
                                                         const Corpus& corpus, ComputePool& pool,
                                                         Communicator* comm, Timeline* timeline) {
  if (comm != nullptr && comm->ranks() == 1) comm = nullptr;
  if (absl::Status status = options.model.validate(); !status.ok()) return status;
  if (absl::Status status = check_plain(options.model); !status.ok()) return status;
  if (options.model.vocab_size % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a vocabulary of %d cannot be trained: it must be a multiple of 16",
                        options.model.vocab_size));
  }
  for (int length : {options.length, options.long_length}) {
    if (length < 16 || length % 16 != 0 || options.batch_tokens % length != 0 ||
        length > options.model.max_position_embeddings) {
      return absl::InvalidArgumentError(
          absl::StrFormat("sequences of %d tokens do not divide a batch of %d, are no multiple of "
                          "16, or are longer "
                          "than the context of %d",
                          length, options.batch_tokens, options.model.max_position_embeddings));
    }
  }
  const int ranks = comm == nullptr ? 1 : comm->ranks();
  if (absl::Status status = check_parallel(options, ranks); !status.ok()) return status;
  const size_t need = static_cast<size_t>(options.long_length) + 2;
  if (corpus.train.size() < need || corpus.held_out.size() < need) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the text is too short: %u training and %u held-out tokens, each must be at least %u",
        corpus.train.size(), corpus.held_out.size(), need));
  }
  auto trainer = std::unique_ptr<Trainer>(new Trainer(options, corpus, pool, comm, timeline));
  const size_t padded = trainer->buckets_.back().end;
  for (FlatArray* array : {&trainer->parameters_, &trainer->gradients_}) {
    absl::StatusOr<FlatArray> made = FlatArray::make(comm, padded);
    if (!made.ok()) return made.status();
    *array = *std::move(made);
  }
  initialize_parameters(trainer->map_, options.seed, trainer->parameters_.data());
  if (comm == nullptr) return trainer;
  trainer->calls_ = std::make_unique<CallTracker>(*comm, timeline);
  auto reducer =
      GradientReducer::create(*comm, *trainer->calls_, pool, options.parallel, trainer->buckets_);
  if (!reducer.ok()) return reducer.status();
  trainer->reducer_ = *std::move(reducer);
  if (options.parallel.zero > 0) {
    trainer->gatherer_ =
        std::make_unique<WeightGatherer>(*comm, *trainer->calls_, trainer->buckets_);
  }
  return trainer;
}

Trainer::Trainer(const TrainerOptions& options, const Corpus& corpus, ComputePool& pool,
                 Communicator* comm, Timeline* timeline)
    : options_(options),
      corpus_(corpus),
      pool_(pool),
      comm_(comm),
      map_(options.model),
      groups_(std::max(1, comm == nullptr ? options.parallel.groups : comm->ranks())),
      micro_batches_(groups_ * options.parallel.accumulate),
      buckets_(cut_buckets(map_, ranks(), options.parallel.bucket_bytes)),
      backprop_(map_, std::max(options.batch_tokens / micro_batches_, options.long_length),
                options.long_length, pool),
      optimizer_(map_, options.optimizer, owned(), pool),
      losses_(micro_batches_),
      squares_(buckets_.back().end / kNormBlock),
      trace_(timeline) {
  if (comm_ == nullptr && groups_ > 1) group_sum_ = AlignedArray<float>(map_.size);
  if (options.parallel.accumulate > 1) micro_ = AlignedArray<float>(map_.size);
}

std::vector<FlatRange> Trainer::shard() const {
  std::vector<FlatRange> parts;
  for (const FlatRange& bucket : buckets_) parts.push_back(part_of(bucket, rank(), ranks()));
  return parts;
}

// What this rank updates: a piece of every bucket, so that pieces and buckets have one numbering.
std::vector<FlatRange> Trainer::owned() const {
  return options_.parallel.zero > 0 ? shard() : buckets_;
}

absl::Status Trainer::compute_gradients(int number) {
  const bool late = static_cast<float>(number) >=
                    (1.0f - options_.long_share) * static_cast<float>(options_.optimizer.steps);
  const int length = late ? options_.long_length : options_.length;
  const int sequences = options_.batch_tokens / length / micro_batches_;
  const int accumulate = options_.parallel.accumulate;
  const int first = comm_ == nullptr ? 0 : rank() * accumulate;
  const int count = comm_ == nullptr ? micro_batches_ : accumulate;
  const auto needed = [&](size_t begin, size_t end) {
    trace_.span("forward", number);
    if (gatherer_ != nullptr) (void)gatherer_->need(begin, end);
    trace_.mark();
  };
  trace_.mark();
  for (int i = 0; i < count; ++i) {
    batch_.clear();
    for (int s = 0; s < sequences; ++s) {
      const auto window =
          corpus_.sample(options_.seed, number, (first + i) * sequences + s, length);
      batch_.insert(batch_.end(), window.begin(), window.end());
    }
    // ((m0 + m1) + ...) of each group, then (g0 + g1) + ...: what an ordered sum over ranks does.
    const bool opens_group = i % accumulate == 0, closes_group = (i + 1) % accumulate == 0;
    float* const sum = i < accumulate ? gradients_.data() : group_sum_.data();
    float* const target = opens_group ? sum : micro_.data();
    const auto ready = [&](size_t begin, size_t end) {
      if (!opens_group) add(pool_, begin, end, micro_.data(), sum);
      if (closes_group && i >= accumulate) add(pool_, begin, end, sum, gradients_.data());
      trace_.span("backward, " + label(map_, begin), number);
      if (reducer_ != nullptr && i + 1 == count) {
        reducer_->ready(gradients_.data(), end == map_.size ? buckets_.back().end : end);
      }
      trace_.mark();
    };
    losses_[first + i] = backprop_.loss_and_gradients(parameters_.data(), batch_, sequences, length,
                                                      target, ready, needed);
  }
  return calls_ == nullptr ? absl::OkStatus() : calls_->status();
}

absl::Status Trainer::share_numbers() {
  const auto count = static_cast<size_t>(options_.parallel.accumulate);
  const double* losses = losses_.data() + static_cast<size_t>(rank()) * count;
  mine_.assign(losses, losses + count);
  const bool sharded = options_.parallel.zero > 0;
  if (sharded) {
    for (const FlatRange& piece : shard()) {
      mine_.insert(mine_.end(), squares_.begin() + piece.begin / kNormBlock,
                   squares_.begin() + piece.end / kNormBlock);
    }
  }
  everybodys_.resize(mine_.size() * ranks());
  const Time begin = Clock::steady().now();
  const CallTracker::Id call = calls_->add(
      comm_->all_gather_async(mine_.data(), everybodys_.data(), mine_.size(), DataType::kF64),
      begin, sharded ? "losses and norm" : "losses", mine_.size() * sizeof(double));
  if (absl::Status status = calls_->wait(call); !status.ok()) return status;
  const double* from = everybodys_.data();
  for (int r = 0; r < ranks(); ++r) {
    std::copy(from, from + count, losses_.begin() + static_cast<size_t>(r) * count);
    from += count;
    if (!sharded) continue;
    for (const FlatRange& bucket : buckets_) {
      const FlatRange part = part_of(bucket, r, ranks());
      const size_t blocks = part.size() / kNormBlock;
      std::copy(from, from + blocks, squares_.begin() + part.begin / kNormBlock);
      from += blocks;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<float> Trainer::update(int number) {
  const auto divisor = static_cast<float>(micro_batches_);
  if (before_update_) {
    if (absl::Status status = before_update_(); !status.ok()) return status;
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (reducer_ != nullptr) {
      if (absl::Status status = reducer_->wait(i, gradients_.data()); !status.ok()) return status;
    }
    optimizer_.sum_squares(i, gradients_.data(), divisor, squares_.data());
  }
  if (comm_ != nullptr) {
    if (absl::Status status = share_numbers(); !status.ok()) return status;
  }
  trace_.mark();
  const float norm = norm_of(squares_);
  if (!all_finite(norm)) return norm;  // at every rank, for all have the same numbers
  for (size_t i = buckets_.size(); i-- > 0;) {
    optimizer_.update(i, number, norm, divisor, parameters_.data(), gradients_.data());
    if (gatherer_ != nullptr) gatherer_->updated(i, parameters_.data());
  }
  trace_.span("update", number);
  if (!options_.parallel.overlap) {
    if (absl::Status status = finish(); !status.ok()) return status;
  }
  return norm;
}

bool Trainer::all_finite(float norm) const {
  return std::isfinite(norm) && std::all_of(losses_.begin(), losses_.end(),
                                            [](double loss) { return std::isfinite(loss); });
}

absl::Status Trainer::count_skipped(const StepReport& report) {
  skipped_ = report.skipped ? skipped_ + 1 : 0;
  if (skipped_ <= options_.max_skipped) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "step %d: the loss is %g and the norm of the gradient %g, and so it was %d times in a row; "
      "nothing of that was applied or saved. Resume from the newest checkpoint with a lower "
      "learning rate or with other data",
      report.step + 1, report.loss, report.norm, skipped_));
}

absl::StatusOr<StepReport> Trainer::step(int number) {
  const Time begin = Clock::steady().now();
  const Time blocked = calls_ == nullptr ? Time::zero() : calls_->blocked();
  if (absl::Status status = compute_gradients(number); !status.ok()) return status;
  absl::StatusOr<float> norm = update(number);
  if (!norm.ok()) return norm.status();
  double loss = 0;
  for (double one : losses_) loss += one;
  StepReport report;
  report.step = number;
  report.loss = static_cast<float>(loss / micro_batches_);
  report.norm = *norm;
  report.rate = learning_rate(options_.optimizer, number);
  report.took = Clock::steady().now() - begin;
  if (calls_ != nullptr) report.exposed = calls_->blocked() - blocked;
  report.skipped = !all_finite(*norm);
  if (absl::Status status = count_skipped(report); !status.ok()) return status;
  return report;
}

absl::Status Trainer::finish() {
  return gatherer_ == nullptr ? absl::OkStatus() : gatherer_->need(0, buckets_.back().end);
}

absl::Status Trainer::gather_weights() {
  if (gatherer_ == nullptr) return absl::OkStatus();
  for (size_t i = buckets_.size(); i-- > 0;) gatherer_->updated(i, parameters_.data());
  return finish();
}

void Trainer::save(int64_t steps, ShardState& state) const {
  state.steps = steps;
  state.pieces = shard();
  const size_t owned = state.owned();
  if (state.values.size() != 3 * owned) state.values = AlignedArray<float>(3 * owned);
  size_t at = 0;
  for (const FlatRange& piece : state.pieces) {
    std::copy_n(parameters_.data() + piece.begin, piece.size(), state.weights() + at);
    optimizer_.copy_moments(piece, state.first_moments() + at, state.second_moments() + at);
    at += piece.size();
  }
}

void Trainer::load(const ShardState& state) {
  size_t at = 0;
  for (const FlatRange& piece : state.pieces) {
    const size_t end = std::min(piece.end, map_.size);  // another number of ranks pads otherwise
    if (piece.begin < end) {
      std::copy_n(state.weights() + at, end - piece.begin, parameters_.data() + piece.begin);
      optimizer_.set_moments({piece.begin, end}, state.first_moments() + at,
                             state.second_moments() + at);
    }
    at += piece.size();
  }
}

absl::StatusOr<double> Trainer::held_out_bits_per_byte(int max_windows, bool rounded) {
  if (absl::Status status = finish(); !status.ok()) return status;
  AlignedArray<float> copy;
  const float* parameters = parameters_.data();
  if (rounded) {
    copy = AlignedArray<float>(map_.size);
    from_checkpoint(map_, checkpoint(), copy.data());
    parameters = copy.data();
  }
  const size_t length = static_cast<size_t>(options_.long_length);
  const size_t all = (corpus_.held_out.size() - 1) / length;
  const size_t windows = std::min(all, static_cast<size_t>(max_windows));
  // Window w is for rank w % ranks(); its sum comes back at the same place for every rank.
  const auto group = static_cast<size_t>(ranks());
  std::vector<double> mine((windows + group - 1) / group), sums(mine.size() * group);
  for (size_t i = 0; i < mine.size(); ++i) {
    const size_t w = i * group + static_cast<size_t>(rank());
    if (w >= windows) continue;
    // Spread over the text where not all of it is used.
    const size_t at = w * all / windows * length;
    mine[i] = backprop_.loss(parameters, std::span(corpus_.held_out).subspan(at, length + 1), 1,
                             static_cast<int>(length)) *
              static_cast<double>(length);
  }
  if (comm_ == nullptr) {
    sums = mine;
  } else if (absl::Status status =
                 comm_->all_gather(mine.data(), sums.data(), mine.size(), DataType::kF64);
             !status.ok()) {
    return status;
  }
  double nats = 0;
  for (size_t w = 0; w < windows; ++w) nats += sums[w % group * mine.size() + w / group];
  const double bytes_per_token =
      static_cast<double>(corpus_.held_out_bytes) / static_cast<double>(corpus_.held_out.size());
  return nats / std::numbers::ln2 /
         (static_cast<double>(windows) * static_cast<double>(length) * bytes_per_token);
}

}  // namespace baton::engine::train
