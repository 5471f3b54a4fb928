// The training step: micro-batches, sums over ranks, update; and evaluation.
#include "engine/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_format.h"
#include "engine/train/step/train_runner.h"
#include "transport/clock.h"

namespace baton::engine::train {

namespace {

// Names the parameter at a place in the flat array, for messages.
std::string label(const ParameterMap& map, size_t place) {
  if (place >= map.embedding.offset) return "embedding";
  for (size_t l = 0; l < map.layers.size(); ++l) {
    if (place >= map.layers[l].down.offset) return absl::StrFormat("layer %u", l);
  }
  return "head";
}

absl::Status check_parallel(const TrainerOptions& options, int ranks) {
  const ParallelOptions& parallel = options.parallel;
  if (parallel.accumulate < 1) {
    return absl::InvalidArgumentError("there must be at least one micro-batch");
  }
  const int micro_batches = parallel.accumulate * ranks;
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
  if (parallel.wire != DataType::kF32 && options.runner) {
    return absl::InvalidArgumentError(
        "gradients in a device's memory travel as f32: leave out --wire bf16, or train with "
        "--device cpu");
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
          absl::StrFormat("sequences of %d tokens do not divide a batch of %d, are not a multiple "
                          "of 16, or are longer "
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
  if (absl::Status status = trainer->start(); !status.ok()) return status;
  return trainer;
}

Trainer::Trainer(const TrainerOptions& options, const Corpus& corpus, ComputePool& pool,
                 Communicator* comm, Timeline* timeline)
    : options_(options),
      corpus_(corpus),
      pool_(pool),
      comm_(comm),
      map_(options.model),
      micro_batches_(ranks() * options.parallel.accumulate),
      buckets_(cut_buckets(map_, ranks(), options.parallel.bucket_bytes)),
      losses_(micro_batches_),
      trace_(timeline),
      timeline_(timeline) {}

absl::Status Trainer::start() {
  const size_t padded = buckets_.back().end;
  const RunnerNeeds needs{map_,
                          options_.optimizer,
                          owned(),
                          padded,
                          std::max(options_.batch_tokens / micro_batches_, options_.long_length),
                          options_.long_length};
  if (options_.runner) {
    auto runner = options_.runner(needs);
    if (!runner.ok()) return runner.status();
    runner_ = *std::move(runner);
  } else {
    runner_ = std::make_unique<CpuRunner>(needs, pool_, comm_);
  }
  std::vector<FlatArray*> arrays = {&parameters_, &gradients_};
  if (options_.parallel.accumulate > 1) arrays.push_back(&micro_);
  for (FlatArray* array : arrays) {
    const bool shared = array == &parameters_ || array == &gradients_;
    absl::StatusOr<FlatArray> made = runner_->make_array(padded, shared);
    if (!made.ok()) return made.status();
    *array = *std::move(made);
  }
  AlignedArray<float> values(map_.size);
  initialize_parameters(map_, options_.seed, values.data());
  absl::Status status = runner_->write(parameters_.data(), values.data(), map_.size);
  if (!status.ok()) return status;
  if (comm_ == nullptr) return view_parameters();
  // If gradients are on a device, the first call prepares the communicator for it. This comes
  // before any work on the device, because loading kernels would wait for that work.
  status =
      comm_->all_reduce(gradients_.data(), gradients_.data(), 1, DataType::kF32, ReduceOp::kSum);
  if (!status.ok()) return status;
  calls_ = std::make_unique<CallTracker>(*comm_, timeline_);
  auto reducer = GradientReducer::create(*comm_, *calls_, pool_, options_.parallel, buckets_);
  if (!reducer.ok()) return reducer.status();
  reducer_ = *std::move(reducer);
  if (options_.parallel.zero > 0) {
    gatherer_ = std::make_unique<WeightGatherer>(*comm_, *calls_, buckets_);
  }
  return view_parameters();
}

absl::Status Trainer::view_parameters() {
  const absl::StatusOr<const float*> there = runner_->view(parameters_.data(), map_.size);
  if (!there.ok()) return there.status();
  host_parameters_ = *there;
  return absl::OkStatus();
}

std::vector<FlatRange> Trainer::shard() const {
  std::vector<FlatRange> parts;
  for (const FlatRange& bucket : buckets_) parts.push_back(part_of(bucket, rank(), ranks()));
  return parts;
}

// The ranges that this rank updates: a piece of every bucket, so that pieces and buckets have one
// numbering.
std::vector<FlatRange> Trainer::owned() const {
  return options_.parallel.zero > 0 ? shard() : buckets_;
}

absl::Status Trainer::compute_gradients(int number) {
  const bool late = static_cast<float>(number) >=
                    (1.0f - options_.long_share) * static_cast<float>(options_.optimizer.steps);
  const int length = late ? options_.long_length : options_.length;
  const int sequences = options_.batch_tokens / length / micro_batches_;
  const int count = options_.parallel.accumulate, first = rank() * count;
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
    const GradientSums sums{i == 0 ? gradients_.data() : micro_.data(), gradients_.data()};
    const auto ready = [&](size_t begin, size_t end) {
      trace_.span("backward, " + label(map_, begin), number);
      if (reducer_ != nullptr && i + 1 == count) {
        reducer_->ready(gradients_.data(), end == map_.size ? buckets_.back().end : end);
      }
      trace_.mark();
    };
    const absl::StatusOr<float> loss = runner_->loss_and_gradients(
        parameters_.data(), batch_, sequences, length, sums, ready, needed);
    if (!loss.ok()) return loss.status();
    losses_[first + i] = *loss;
  }
  return calls_ == nullptr ? absl::OkStatus() : calls_->status();
}

absl::Status Trainer::share_numbers() {
  const auto count = static_cast<size_t>(options_.parallel.accumulate);
  const std::span<double> squares = runner_->squares();
  const double* losses = losses_.data() + static_cast<size_t>(rank()) * count;
  mine_.assign(losses, losses + count);
  const bool sharded = options_.parallel.zero > 0;
  if (sharded) {
    for (const FlatRange& piece : shard()) {
      mine_.insert(mine_.end(), squares.begin() + piece.begin / kNormBlock,
                   squares.begin() + piece.end / kNormBlock);
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
      std::copy(from, from + blocks, squares.begin() + part.begin / kNormBlock);
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
    absl::Status status = runner_->sum_squares(i, gradients_.data(), divisor);
    if (!status.ok()) return status;
  }
  if (absl::Status status = runner_->wait(); !status.ok()) return status;
  if (comm_ != nullptr) {
    if (absl::Status status = share_numbers(); !status.ok()) return status;
  }
  trace_.mark();
  const float norm = norm_of(runner_->squares());
  if (!all_finite(norm)) return norm;  // at every rank, for all have the same numbers
  for (size_t i = buckets_.size(); i-- > 0;) {
    absl::Status status =
        runner_->update(i, number, norm, divisor, parameters_.data(), gradients_.data());
    if (gatherer_ != nullptr && status.ok()) status = runner_->wait();
    if (!status.ok()) return status;
    if (gatherer_ != nullptr) gatherer_->updated(i, parameters_.data());
  }
  if (absl::Status status = runner_->wait(); !status.ok()) return status;
  trace_.span("update", number);
  if (!options_.parallel.overlap) {
    if (absl::Status status = gathered(); !status.ok()) return status;
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
      "step %d: the loss is %g and the norm of the gradient %g, %d times in a row; none of these "
      "steps was applied or saved. Resume from the newest checkpoint with a lower "
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

// A trainer's state to and from the host: weights, shards of checkpoints; and evaluation.

absl::Status Trainer::gathered() {
  return gatherer_ == nullptr ? absl::OkStatus() : gatherer_->need(0, buckets_.back().end);
}

absl::Status Trainer::finish() {
  if (absl::Status status = gathered(); !status.ok()) return status;
  return view_parameters();
}

absl::Status Trainer::gather_weights() {
  if (gatherer_ == nullptr) return absl::OkStatus();
  for (size_t i = buckets_.size(); i-- > 0;) gatherer_->updated(i, parameters_.data());
  return finish();
}

absl::Status Trainer::for_state(const ShardState& state, StateVisit visit) {
  const std::vector<FlatRange> ours = owned();
  absl::Status status;
  size_t at = 0;  // of the piece in each of the state's arrays
  for (const FlatRange& piece : state.pieces) {
    const size_t last = std::min(piece.end, map_.size);  // another number of ranks pads otherwise
    if (piece.begin < last) {
      status.Update(visit(parameters_.data() + piece.begin, at, last - piece.begin));
    }
    size_t place = 0;  // of what is held here, among the moments
    for (const FlatRange& held : ours) {
      const size_t begin = std::max(piece.begin, held.begin), end = std::min(last, held.end);
      for (size_t which = 0; which < 2 && begin < end; ++which) {
        status.Update(visit(runner_->moments()[which] + place + begin - held.begin,
                            (1 + which) * state.owned() + at + begin - piece.begin, end - begin));
      }
      place += held.size();
    }
    if (!status.ok()) return status;
    at += piece.size();
  }
  return status;
}

absl::Status Trainer::save(int64_t steps, ShardState& state) {
  state.steps = steps;
  state.pieces = shard();
  const size_t size = 3 * state.owned();
  if (state.values.size() != size) state.values = AlignedArray<float>(size);
  return for_state(state, [&](const float* here, size_t there, size_t count) {
    return runner_->read(state.values.data() + there, here, count);
  });
}

absl::Status Trainer::load(const ShardState& state) {
  return for_state(state, [&](float* here, size_t there, size_t count) {
    return runner_->write(here, state.values.data() + there, count);
  });
}

absl::StatusOr<double> Trainer::held_out_bits_per_byte(int max_windows, bool rounded) {
  if (absl::Status status = finish(); !status.ok()) return status;
  FlatArray copy;
  const float* parameters = parameters_.data();
  if (rounded) {
    AlignedArray<float> values(map_.size);
    from_checkpoint(map_, checkpoint(), values.data());
    absl::StatusOr<FlatArray> made = runner_->make_array(map_.size, false);
    if (!made.ok()) return made.status();
    copy = *std::move(made);
    absl::Status status = runner_->write(copy.data(), values.data(), map_.size);
    if (!status.ok()) return status;
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
    const absl::StatusOr<float> loss =
        runner_->loss(parameters, std::span(corpus_.held_out).subspan(at, length + 1), 1,
                      static_cast<int>(length));
    if (!loss.ok()) return loss.status();
    mine[i] = *loss * static_cast<double>(length);
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
