// A training run as one rank sees it: start or resume, step, report, save; meet again and go on
// when a rank was lost.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "collectives/launch.h"
#include "engine/train/corpus.h"
#include "engine/train/trainer.h"
#include "transport/decorators.h"
#include "transport/settings.h"

namespace baton::engine::train {

struct RunOptions {
  TrainerOptions trainer;
  int threads = 0;  // of this rank; 0: its share of the CPUs

  // How ranks communicate. With `ordered`, the weights do not depend on the number of ranks or on
  // the route.
  std::string provider;           // empty: whatever is best
  SettingValues settings;         // of their workers
  std::optional<LinkShape> link;  // pretend to have this one
  bool ordered = false;

  std::string checkpoint_dir;  // empty: none
  int checkpoint_every = 200;  // steps; and after the last one
  std::string resume_dir;      // empty: from the start
  bool new_schedule = false;   // resume although it was begun with another number of steps
  // Survives the loss of ranks that a launcher restarts; needs ZeRO-1 and more than one rank.
  bool recover = false;
  int copy_every = 1;  // steps between copies in a peer's memory

  std::string timeline_file;  // Perfetto JSON of all ranks, written by rank 0; empty: none
  std::string curve_file;     // CSV, written by rank 0; empty: none

  // At every rank, behind a step and its copy and checkpoint.
  std::function<void(int step)> after_step;
  // At rank 0, with the final weights.
  std::function<absl::Status(const Trainer& trainer)> done;
};

// Rank 0 prints. InvalidArgument for options that do not fit together.
absl::Status run_rank(const RunOptions& options, const Corpus& corpus, const launch::Place& place);

// `baton train`: trains a small Llama on text and writes a Hugging Face directory.

// Options: --preset nano|small, --steps N, --out DIR, --data FILE, --ranks N, and the rest in
// --help. Returns an exit status; errors go to stderr.
int train_main(int argc, char** argv);

}  // namespace baton::engine::train
