// A training run of one rank: the loop around the steps.
#include "engine/train/train_run.h"

#include <algorithm>
#include <cstdio>
#include <numbers>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/files/files.h"
#include "engine/train/data_parallel/sharded_checkpoint.h"
#include "engine/train/exposure.h"
#include "engine/train/replica.h"

namespace baton::engine::train {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kReportEvery = 20, kEvaluateEvery = 200;  // steps
constexpr int kMostGenerations = 16;                    // one after the other without a single step

struct LossPoint {
  int step = 0;  // from 0
  double loss = 0;
  double held_out_bits = 0;  // per byte; 0: not measured after this step
};

class Run {
 public:
  Run(const RunOptions& options, const Corpus& corpus, const launch::Place& place);
  absl::Status run();

 private:
  // Meets the others as this generation and trains to the end.
  absl::Status generation(uint64_t number);
  absl::StatusOr<int64_t> start(uint64_t number);  // the steps that are done already
  absl::StatusOr<int64_t> load_checkpoint(const std::string& directory);
  absl::Status check_schedule(const CheckpointManifest& manifest) const;
  absl::Status step(int number);
  absl::Status save_checkpoint(int64_t steps);
  absl::Status report(const StepReport& report);
  absl::Status finish();
  absl::Status write_results();
  absl::Status write_timeline();
  bool leads() const { return place_.rank == 0; }
  int steps() const { return options_.trainer.optimizer.steps; }

  const RunOptions& options_;
  const Corpus& corpus_;
  const launch::Place& place_;
  const RunIdentity identity_;
  ComputePool pool_;
  std::unique_ptr<Timeline> timeline_;
  ReplicaStore store_;
  ShardState shard_;  // of checkpoints
  std::vector<LossPoint> curve_;
  // Since the last report, and of this process.
  Time reported_at_{};
  int reported_steps_ = 0;
  Time exposed_{}, stepping_{};
  // Members of a generation, in this order so that they are destroyed in reverse.
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Replicator> replicator_;
};

int threads_of(const RunOptions& options, const launch::Place& place) {
  if (options.threads > 0) return options.threads;
  const int cpus = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cpus / std::max(1, place.local_ranks));
}

Run::Run(const RunOptions& options, const Corpus& corpus, const launch::Place& place)
    : options_(options),
      corpus_(corpus),
      place_(place),
      identity_(identity_of(options.trainer.model, corpus.train, options.trainer.seed)),
      pool_(threads_of(options, place)) {
  if (!options.timeline_file.empty()) {
    timeline_ = std::make_unique<Timeline>(absl::StrCat("rank ", place.rank));
  }
}

absl::Status Run::run() {
  uint64_t number = place_.generation;
  for (int attempt = 0;; ++attempt) {
    const absl::Status status = generation(number);
    // The launcher: the others have ended with everything done, and cannot be met again.
    if (options_.recover && comm_ == nullptr && absl::IsCancelled(status)) return absl::OkStatus();
    if (reported_steps_ > 0) attempt = 0;
    // Not by what is wrong here, which would be wrong again.
    const bool broken = comm_ != nullptr
                            ? !comm_->status().ok()
                            : !absl::IsInvalidArgument(status) && !absl::IsUnauthenticated(status);
    // Tells the other ranks of a local error: they would wait for this rank.
    if (!status.ok() && comm_ != nullptr && !broken) comm_->abort(status);
    if (status.ok() || !options_.recover || !broken || attempt == kMostGenerations) return status;
    std::fprintf(stderr, "rank %d: %s\nrank %d: joining the others again\n", place_.rank,
                 std::string(status.message()).c_str(), place_.rank);
    ++number;
  }
}

absl::Status Run::generation(uint64_t number) {
  reported_steps_ = 0;
  replicator_.reset();
  trainer_.reset();
  comm_.reset();
  if (place_.ranks > 1) {
    CommunicatorOptions options;
    options.rank = place_.rank;
    options.ranks = place_.ranks;
    options.rendezvous = place_.rendezvous;
    options.generation = number;
    options.name = "trainer";
    options.worker.name = absl::StrCat("rank-", place_.rank);
    options.worker.shape = options_.link;
    options.worker.settings = options_.settings;
    if (!options_.provider.empty()) {
      options.worker.providers = {options_.provider};
      options.worker.require = options_.provider;
    }
    options.background = true;
    options.ordered = options_.ordered;
    absl::StatusOr<std::unique_ptr<Communicator>> comm = Communicator::create(std::move(options));
    if (!comm.ok()) return comm.status();
    comm_ = *std::move(comm);
  }
  absl::StatusOr<std::unique_ptr<Trainer>> trainer =
      Trainer::create(options_.trainer, corpus_, pool_, comm_.get(), timeline_.get());
  if (!trainer.ok()) return trainer.status();
  trainer_ = *std::move(trainer);
  if (options_.trainer.runner) {
    std::printf("rank %d computes on %s\n", place_.rank, trainer_->runs_on().c_str());
    std::fflush(stdout);
  }
  if (options_.recover) replicator_ = std::make_unique<Replicator>(*comm_, *trainer_, store_);

  absl::StatusOr<int64_t> first = start(number);
  if (!first.ok()) return first.status();
  if (leads() && *first > 0) std::printf("going on after step %d\n", static_cast<int>(*first));
  while (!curve_.empty() && curve_.back().step >= *first) curve_.pop_back();  // done again
  reported_at_ = Clock::steady().now();
  exposed_ = stepping_ = Time::zero();
  for (int i = static_cast<int>(*first); i < steps(); ++i) {
    if (absl::Status status = step(i); !status.ok()) return status;
  }
  return finish();
}

absl::StatusOr<int64_t> Run::start(uint64_t number) {
  if (replicator_ != nullptr) {
    const absl::StatusOr<int64_t> steps = replicator_->restore();
    if (!steps.ok() || *steps != ReplicaStore::kNothing) return steps;
  }
  // A generation that follows another one may find what that one wrote.
  const RunIdentity& identity = identity_;
  const auto written =
      options_.checkpoint_dir.empty()
          ? absl::StatusOr<CheckpointManifest>(absl::NotFoundError(""))
          : find_checkpoint(options_.checkpoint_dir, identity, trainer_->map().size);
  const bool ours = number > 0 || options_.checkpoint_dir == options_.resume_dir;
  if (!absl::IsNotFound(written.status()) && !ours) {
    return absl::AlreadyExistsError(
        absl::StrCat(options_.checkpoint_dir,
                     " holds checkpoints of another run: continue from them with --resume ",
                     options_.checkpoint_dir, ", or name another directory"));
  }
  std::string from = options_.resume_dir;
  if (written.ok() && ours) from = options_.checkpoint_dir;
  int64_t steps = 0;
  if (!from.empty()) {
    const absl::StatusOr<int64_t> loaded = load_checkpoint(from);
    if (!loaded.ok()) return loaded.status();
    steps = *loaded;
  }
  if (comm_ == nullptr) return steps;
  std::vector<int64_t> all(static_cast<size_t>(place_.ranks));
  absl::Status status = comm_->all_gather(&steps, all.data(), 1, DataType::kI64);
  if (!status.ok()) return status;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == steps) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "the newest checkpoint in %s is of step %d at rank %d but of step %d at rank %u: the "
        "directory must be the same one for all ranks",
        from, steps, place_.rank, all[r], r));
  }
  return steps;
}

// The rate of a step follows from how many there are to be.
absl::Status Run::check_schedule(const CheckpointManifest& manifest) const {
  if (manifest.schedule_steps == steps() || options_.new_schedule) return absl::OkStatus();
  if (manifest.schedule_steps == 0) return absl::OkStatus();  // of a version that did not say
  OptimizerOptions begun = options_.trainer.optimizer;
  begun.steps = static_cast<int>(manifest.schedule_steps);
  const auto next = static_cast<int>(manifest.steps);
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s was trained with --steps %d; with --steps %d the learning rate of the next step would be "
      "%.2e instead of %.2e. Resume with --steps %d, or pass --new-schedule if that is intended",
      manifest.path, begun.steps, steps(), learning_rate(options_.trainer.optimizer, next),
      learning_rate(begun, next), begun.steps));
}

absl::StatusOr<int64_t> Run::load_checkpoint(const std::string& directory) {
  const absl::StatusOr<CheckpointManifest> manifest =
      find_checkpoint(directory, identity_, trainer_->map().size);
  if (!manifest.ok()) return manifest.status();
  if (manifest->steps > steps()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s already has %d steps, more than --steps %d", manifest->path, manifest->steps, steps()));
  }
  if (absl::Status status = check_schedule(*manifest); !status.ok()) return status;
  size_t elements = 0;
  for (int shard = 0; shard < static_cast<int>(manifest->shards.size()); ++shard) {
    const absl::StatusOr<ShardState> state = read_shard(*manifest, shard);
    if (!state.ok()) return state.status();
    if (absl::Status status = trainer_->load(*state); !status.ok()) return status;
    elements += state->owned();
  }
  if (elements < trainer_->map().size) {
    return absl::DataLossError(absl::StrFormat("the shards of %s hold %u of %u parameters",
                                               manifest->path, elements, trainer_->map().size));
  }
  return manifest->steps;
}

absl::Status Run::step(int number) {
  const absl::StatusOr<StepReport> done = trainer_->step(number);
  if (!done.ok()) return done.status();
  const int64_t count = number + 1;
  const bool last = count == steps();
  if (replicator_ != nullptr && count % options_.copy_every == 0 && !last) {
    if (absl::Status status = replicator_->begin(count); !status.ok()) return status;
  }
  if (!options_.checkpoint_dir.empty() && (count % options_.checkpoint_every == 0 || last)) {
    if (absl::Status status = save_checkpoint(count); !status.ok()) return status;
  }
  if (absl::Status status = report(*done); !status.ok()) return status;
  if (options_.after_step) options_.after_step(number);
  return absl::OkStatus();
}

absl::Status Run::save_checkpoint(int64_t steps) {
  if (absl::Status status = trainer_->save(steps, shard_); !status.ok()) return status;
  const absl::StatusOr<ShardSeal> seal =
      write_shard(options_.checkpoint_dir, shard_, place_.rank, place_.ranks);
  if (!seal.ok()) return seal.status();
  CheckpointManifest manifest{"", steps, trainer_->map().size, this->steps(), identity_, {*seal}};
  if (comm_ != nullptr) {
    manifest.shards.resize(static_cast<size_t>(place_.ranks));
    static_assert(sizeof(ShardSeal) == 2 * sizeof(int64_t));
    absl::Status status = comm_->all_gather(&*seal, manifest.shards.data(), 2, DataType::kI64);
    if (!status.ok()) return status;
  }
  return leads() ? finish_checkpoint(options_.checkpoint_dir, manifest) : absl::OkStatus();
}

absl::Status Run::report(const StepReport& report) {
  const int count = report.step + 1;
  const bool last = count == steps();
  if (report.skipped && leads()) {
    std::fprintf(stderr,
                 "step %d: skipped, because the loss is %g and the norm of the gradient %g\n",
                 count, report.loss, report.norm);
  }
  ++reported_steps_;
  exposed_ += report.exposed;
  stepping_ += report.took;
  LossPoint point{report.step, report.loss, 0};
  const bool evaluate = (report.step % kEvaluateEvery == 0 && report.step > 0) || last;
  if (evaluate) {
    const auto bits = trainer_->held_out_bits_per_byte(last ? 1 << 20 : 16, last);
    if (!bits.ok()) return bits.status();
    point.held_out_bits = *bits;
  }
  if (!leads()) return absl::OkStatus();
  curve_.push_back(point);
  if (report.step % kReportEvery != 0 && !last) return absl::OkStatus();
  const double rate = reported_steps_ / Seconds(Clock::steady().now() - reported_at_).count();
  const double bytes_per_token =
      static_cast<double>(corpus_.held_out_bytes) / static_cast<double>(corpus_.held_out.size());
  std::string notes;
  if (comm_ != nullptr) {
    notes = absl::StrFormat("  exposed %.1f ms (%.0f %%)",
                            Seconds(exposed_).count() * 1e3 / reported_steps_,
                            100 * Seconds(exposed_).count() / Seconds(stepping_).count());
  }
  if (evaluate) absl::StrAppendFormat(&notes, "  held out %.3f bits/byte", point.held_out_bits);
  std::printf(
      "step %4d/%d  loss %.3f  %.3f bits/byte  norm %.2f  rate %.1e  %.1f k tokens/s%s  "
      "%.0f s left\n",
      count, steps(), report.loss, report.loss / std::numbers::ln2 / bytes_per_token, report.norm,
      report.rate, rate * options_.trainer.batch_tokens / 1e3, notes.c_str(),
      (steps() - count) / rate);
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Run::write_timeline() {
  std::vector<std::string> traces = {timeline_->to_json()};
  if (comm_ != nullptr) {
    const auto size = static_cast<int64_t>(traces[0].size());
    std::vector<int64_t> sizes(static_cast<size_t>(place_.ranks));
    absl::Status status = comm_->all_gather(&size, sizes.data(), 1, DataType::kI64);
    if (!status.ok()) return status;
    if (!leads()) return comm_->send(traces[0].data(), traces[0].size(), DataType::kU8, 0);
    for (int r = 1; r < place_.ranks; ++r) {
      std::string& trace = traces.emplace_back(static_cast<size_t>(sizes[r]), '\0');
      status = comm_->receive(trace.data(), trace.size(), DataType::kU8, r);
      if (!status.ok()) return status;
    }
  }
  absl::StatusOr<std::string> joined = join_traces(traces);
  if (!joined.ok()) return joined.status();
  return write_file_atomically(options_.timeline_file, *joined);
}

absl::Status Run::finish() {
  if (absl::Status status = trainer_->finish(); !status.ok()) return status;
  if (timeline_ != nullptr) {
    if (absl::Status status = write_timeline(); !status.ok()) return status;
  }
  if (leads()) {
    if (absl::Status status = write_results(); !status.ok()) return status;
  }
  if (comm_ == nullptr) return absl::OkStatus();
  // A rank may end only when all is written: until then the state of any other one may be lost, and
  // this one's copy of it be needed. However long that takes: the failure detector sees the dead.
  const absl::Status all = comm_->barrier({.timeout = kNever});
  return leads() ? absl::OkStatus() : all;
}

absl::Status Run::write_results() {
  if (!options_.curve_file.empty()) {
    std::string csv = "step,loss,held_out_bits_per_byte\n";
    for (const LossPoint& point : curve_) {
      absl::StrAppendFormat(&csv, "%d,%.6g,", point.step, point.loss);
      if (point.held_out_bits > 0) absl::StrAppendFormat(&csv, "%.6g", point.held_out_bits);
      csv += '\n';
    }
    absl::Status status = write_file_atomically(options_.curve_file, csv);
    if (!status.ok()) return status;
  }
  return options_.done ? options_.done(*trainer_) : absl::OkStatus();
}

}  // namespace

absl::Status run_rank(const RunOptions& options, const Corpus& corpus, const launch::Place& place) {
  if (options.checkpoint_every < 1 || options.copy_every < 1) {
    return absl::InvalidArgumentError("checkpoints and copies are at least one step apart");
  }
  if (options.recover && (place.ranks < 2 || options.trainer.parallel.zero == 0)) {
    return absl::InvalidArgumentError(
        "replacing a lost rank needs a copy of its part of the state in another rank's memory: "
        "train with at least two ranks and --zero 1");
  }
  return Run(options, corpus, place).run();
}

}  // namespace baton::engine::train
