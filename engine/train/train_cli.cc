// `baton train`: options, presets, starting ranks, saving.

#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "collectives/launch.h"
#include "collectives/rendezvous.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "engine/files/files.h"
#include "engine/train/corpus.h"
#include "engine/train/data_parallel/sharded_checkpoint.h"
#include "engine/train/device/device_runner.h"
#include "engine/train/exposure.h"
#include "engine/train/train_run.h"

namespace baton::engine::train {
namespace {

struct Settings {
  std::string preset = "small";
  std::string out = "out/model";
  std::string data;
  int steps = 0;  // 0: the preset's
  uint64_t seed = 1;
  int ranks = 0;  // 0: as the environment says, or one
  bool restart = false;
  int max_restarts = launch::ForkOptions().max_restarts;
  std::string link;
  std::string wire = "f32";
  std::string device = "cpu";
  bool no_overlap = false;
  std::string check;  // a timeline
  RunOptions run;     // what is set directly
};

struct Preset {
  const char* name;
  int hidden, layers, heads, kv_heads, intermediate, vocab, steps;
  int batch_tokens, length, long_length;
};
constexpr Preset kPresets[] = {
    {"tiny", 32, 2, 2, 1, 64, 272, 40, 256, 32, 64},
    {"nano", 128, 4, 4, 2, 352, 512, 1000, 4096, 256, 1024},
    {"small", 192, 4, 6, 3, 512, 1024, 1600, 4096, 256, 1024},
};

TrainerOptions options_for(const Preset& preset, const Settings& settings) {
  TrainerOptions options = settings.run.trainer;
  ModelConfig& model = options.model;
  model.hidden_size = preset.hidden;
  model.intermediate_size = preset.intermediate;
  model.num_layers = preset.layers;
  model.num_heads = preset.heads;
  model.num_kv_heads = preset.kv_heads;
  model.head_dim = preset.hidden / preset.heads;
  model.vocab_size = preset.vocab;
  model.max_position_embeddings = 1024;
  model.tie_word_embeddings = true;
  model.bos_token_id = 256;
  model.eos_token_ids = {256};
  options.optimizer.steps = settings.steps > 0 ? settings.steps : preset.steps;
  options.batch_tokens = preset.batch_tokens;
  options.length = preset.length;
  options.long_length = preset.long_length;
  options.seed = settings.seed;
  options.parallel.overlap = !settings.no_overlap;
  options.parallel.wire = settings.wire == "bf16" ? DataType::kBF16 : DataType::kF32;
  return options;
}

int fail(const absl::Status& status) {
  std::fprintf(stderr, "baton train: %s\n", std::string(status.message()).c_str());
  return 1;
}

int check(const std::string& path) {
  absl::StatusOr<std::string> trace = read_file(path);
  if (!trace.ok()) return fail(trace.status());
  absl::StatusOr<Exposure> exposure = measure_exposure(*trace);
  if (!exposure.ok()) return fail(exposure.status());
  std::printf("%s", exposure->to_string().c_str());
  return 0;
}

// Makes the folders that this run writes and locks them, so that no other run writes there too.
absl::StatusOr<std::vector<FolderLock>> lock_folders(const Settings& settings) {
  std::vector<FolderLock> locks;
  std::string first;
  for (const std::string& folder : {settings.out, settings.run.checkpoint_dir}) {
    if (folder.empty()) continue;
    if (absl::Status status = make_directories(folder); !status.ok()) return status;
    std::error_code error;
    if (!first.empty() && std::filesystem::equivalent(first, folder, error)) continue;
    first = folder;
    absl::StatusOr<FolderLock> lock = FolderLock::take(folder);
    if (!lock.ok()) return lock.status();
    locks.push_back(*std::move(lock));
  }
  return locks;
}

// Opens the device in a child, before anything is learned: this process may fork ranks, and a
// driver does not outlive that. The child says what is wrong.
absl::StatusOr<bool> can_train_on(const TrainDevice& device, int local_rank) {
  if (!device.cuda) return true;
  const pid_t child = fork();
  if (child < 0) return absl::ErrnoToStatus(errno, "fork");
  if (child == 0) {
    const absl::Status status = try_device(device, local_rank);
    if (!status.ok()) fail(status);
    _exit(status.ok() ? 0 : 1);
  }
  int how = 0;
  while (waitpid(child, &how, 0) < 0) {
    if (errno != EINTR) return absl::ErrnoToStatus(errno, "waitpid");
  }
  return how == 0;
}

int train(Settings& settings) {
  RunOptions& run = settings.run;
  const absl::StatusOr<TrainDevice> device = parse_train_device(settings.device);
  if (!device.ok()) return fail(device.status());
  if (device->cuda && settings.wire != "f32") {
    return fail(absl::InvalidArgumentError(
        "gradients in a device's memory travel as f32: leave out --wire bf16, or train with "
        "--device cpu"));
  }
  run.recover = settings.restart;
  if (!settings.link.empty()) {
    absl::StatusOr<LinkShape> shape = LinkShape::parse(settings.link);
    if (!shape.ok()) return fail(shape.status());
    run.link = *shape;
  }
  const auto started = launch::place_for(settings.ranks);
  if (!started.ok()) return fail(started.status());
  const launch::Place place = started->value_or(launch::Place{});
  const bool talks = place.rank == 0;
  // Held by the launcher of ranks that are forked, whichever of them dies.
  absl::StatusOr<std::vector<FolderLock>> locks;
  if (talks) locks = lock_folders(settings);
  if (talks && !locks.ok()) return fail(locks.status());
  const absl::StatusOr<bool> usable = can_train_on(*device, place.local_rank);
  if (!usable.ok()) return fail(usable.status());
  if (!*usable) return 1;
  // Checks this before anything is read or waited for. A restarted rank gets its state from a peer.
  if (!run.resume_dir.empty() && place.generation == 0) {
    if (absl::Status status = has_checkpoint(run.resume_dir); !status.ok()) return fail(status);
  }
  const auto preset = std::find_if(std::begin(kPresets), std::end(kPresets),
                                   [&](const Preset& p) { return p.name == settings.preset; });
  absl::StatusOr<std::string> text =
      settings.data.empty() ? read_king_james() : read_file(settings.data);
  if (!text.ok()) return fail(text.status());
  if (talks) {
    std::printf("learning %d tokens from %.2f MB of text\n", preset->vocab,
                static_cast<double>(text->size()) / 1e6);
  }
  absl::StatusOr<Tokenizer> tokenizer = train_bpe(Corpus::training_text(*text), preset->vocab);
  if (!tokenizer.ok()) return fail(tokenizer.status());
  const Corpus corpus = Corpus::make(*text, *tokenizer);
  run.trainer = options_for(*preset, settings);
  if (talks) {
    std::printf("%.2f M parameters, %.2f M training tokens, %d steps of %d tokens, %d rank(s)\n",
                static_cast<double>(ParameterMap(run.trainer.model).size) / 1e6,
                static_cast<double>(corpus.train.size()) / 1e6, run.trainer.optimizer.steps,
                run.trainer.batch_tokens, std::max(settings.ranks, place.ranks));
  }
  run.done = [&](const Trainer& trainer) {
    absl::Status status = save_checkpoint(settings.out, trainer.checkpoint(), &*tokenizer);
    if (status.ok()) std::printf("saved %s\n", settings.out.c_str());
    return status;
  };

  const auto rank_main = [&](const launch::Place& here, int) {
    if (device->cuda) run.trainer.runner = run_on(*device, here.local_rank);
    try {
      const absl::Status status = run_rank(run, corpus, here);
      return status.ok() ? 0 : fail(status);
    } catch (const std::bad_alloc& none) {
      return fail(absl::ResourceExhaustedError(absl::StrCat(
          "rank ", here.rank, ": no memory: ", none.what(), "; fewer --ranks need less")));
    }
  };
  if (settings.ranks > 1) {
    absl::StatusOr<int> result = launch::fork_ranks({.ranks = settings.ranks,
                                                     .restart = settings.restart,
                                                     .max_restarts = settings.max_restarts},
                                                    rank_main);
    return result.ok() ? *result : fail(result.status());
  }
  std::unique_ptr<collectives::RendezvousServer> server;
  if (place.serves) {
    const absl::StatusOr<ClusterKey> key = ClusterKey::for_this_user();
    if (!key.ok()) return fail(key.status());
    auto serving = collectives::RendezvousServer::start_at(*key, place.rendezvous,
                                                           static_cast<uint32_t>(place.ranks));
    if (!serving.ok()) return fail(serving.status());
    server = *std::move(serving);
  }
  return rank_main(place, 0);
}

}  // namespace

int train_main(int argc, char** argv) {
  Settings settings;
  RunOptions& run = settings.run;
  ParallelOptions& parallel = run.trainer.parallel;
  CLI::App app(
      "Trains a small Llama on text and writes a Hugging Face directory. Ranks are forked with "
      "--ranks, or started by mpirun, srun or torchrun.");
  using command_line::one_of;
  using command_line::whole_number;
  constexpr int kMost = 1 << 30;
  app.add_option("--preset", settings.preset,
                 "tiny (28 k parameters, to try things), nano (0.8 M) or small (1.8 M)")
      ->check(one_of({"tiny", "nano", "small"}))
      ->capture_default_str();
  app.add_option("--steps", settings.steps,
                 "number of steps, of 4096 tokens each, of 256 for tiny (default: the preset's)")
      ->check(whole_number(1, kMost));
  app.add_option("--out", settings.out, "folder to write")
      ->check(command_line::writable_folder())
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--data", settings.data, "text file (default: Debian's bible-kjv)")
      ->check(command_line::readable_file())
      ->type_name("FILE");
  app.add_option("--device", settings.device,
                 "where to compute steps: cpu; cuda, where the ranks of a machine divide its "
                 "devices; or cuda:N")
      ->check(CLI::Validator(
          [](std::string& text) {
            return std::string(parse_train_device(text).status().message());
          },
          ""))
      ->type_name("cpu|cuda[:N]")
      ->capture_default_str();
  app.add_option("--threads", run.threads,
                 "compute threads of each rank (default: its share of the CPUs)")
      ->check(whole_number(1, 1024));
  app.add_option("--seed", settings.seed, "seed of weights and data order")
      ->check(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  app.add_option("--max-skipped", run.trainer.max_skipped,
                 "exit after more than this many steps in a row with a gradient that is not finite")
      ->check(whole_number(0, kMost))
      ->capture_default_str();
  app.add_option("--timeline", run.timeline_file, "write a Perfetto trace of all ranks")
      ->check(command_line::writable_file())
      ->type_name("FILE");
  app.add_option("--curve", run.curve_file, "write the loss of each step as CSV")
      ->check(command_line::writable_file())
      ->type_name("FILE");
  app.add_option("--check", settings.check,
                 "do not train: report how much communication a --timeline shows as hidden")
      ->check(command_line::readable_file())
      ->type_name("FILE");

  const char* several = "Several ranks";
  app.add_option("--ranks", settings.ranks, "number of ranks to fork")
      ->check(whole_number(1, 1024))
      ->group(several);
  command_line::add_provider(
      app, run.provider, "provider between ranks: any that `baton info` lists (default: the best)")
      ->group(several);
  command_line::add_settings(app, run.settings)->group(several);
  command_line::add_link(app, settings.link)->group(several);
  app.add_flag("--ordered", run.ordered,
               "sum in a fixed order: the same bits on any number of ranks")
      ->group(several);
  app.add_option("--zero", parallel.zero, "1: shard gradients, moments and updates (ZeRO-1)")
      ->check(one_of({"0", "1"}))
      ->capture_default_str()
      ->group(several);
  app.add_option("--bucket", parallel.bucket_bytes,
                 "gradient bytes per message (default: a 24th of all)")
      ->transform(command_line::byte_size())
      ->type_name("BYTES")
      ->group(several);
  app.add_option("--accumulate", parallel.accumulate, "micro-batches of each rank in a step")
      ->check(whole_number(1, kMost))
      ->capture_default_str()
      ->group(several);
  app.add_option("--wire", settings.wire, "gradients between ranks as f32 or bf16")
      ->check(one_of({"f32", "bf16"}))
      ->capture_default_str()
      ->group(several);
  app.add_flag("--no-overlap", settings.no_overlap, "communicate only while nothing is computed")
      ->group(several);

  const char* going_on = "Going on";
  app.add_option("--checkpoint", run.checkpoint_dir, "folder for checkpoints, one file per rank")
      ->check(command_line::writable_folder())
      ->type_name("DIR")
      ->group(going_on);
  app.add_option("--checkpoint-every", run.checkpoint_every, "steps")
      ->check(whole_number(1, kMost))
      ->capture_default_str()
      ->group(going_on);
  app.add_option("--resume", run.resume_dir, "continue from the newest checkpoint in this folder")
      ->check(command_line::readable_folder())
      ->type_name("DIR")
      ->group(going_on);
  app.add_flag("--new-schedule", run.new_schedule,
               "resume although --steps, and so the learning rate, differs")
      ->group(going_on);
  app.add_flag("--restart", settings.restart,
               "restart a killed rank, with its state from a peer's memory (needs --zero 1)")
      ->group(going_on);
  app.add_option("--max-restarts", settings.max_restarts,
                 "with --restart: restarts of ranks within an hour before the run ends")
      ->check(whole_number(0, kMost))
      ->capture_default_str()
      ->group(going_on);
  app.add_option("--copy-every", run.copy_every, "steps between copies to a peer's memory")
      ->check(whole_number(1, kMost))
      ->capture_default_str()
      ->group(going_on);
  if (const int status = command_line::parse(app, "baton train", argc, argv); status >= 0) {
    return status;
  }
  if (!run.provider.empty()) {
    command_line::tell_idle_settings("baton train", run.settings, {run.provider});
  }
  return settings.check.empty() ? train(settings) : check(settings.check);
}

}  // namespace baton::engine::train
