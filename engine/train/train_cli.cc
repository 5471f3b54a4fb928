// `baton train`: options, presets, the progress line, saving.
#include "engine/train/train_cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "engine/model/files.h"
#include "engine/train/bpe_trainer.h"
#include "engine/train/trainer.h"

namespace baton {
namespace {

using Seconds = std::chrono::duration<double>;

struct Settings {
  std::string preset = "small";
  std::string out = "out/model";
  std::string data;
  int steps = 0;  // 0: the preset's
  int threads = 0;
  uint64_t seed = 1;
};

struct Preset {
  const char* name;
  int hidden, layers, heads, kv_heads, intermediate, vocab, steps;
};
constexpr Preset kPresets[] = {
    {"nano", 128, 4, 4, 2, 352, 512, 1000},
    {"small", 192, 4, 6, 3, 512, 1024, 1600},
};

TrainerOptions options_for(const Preset& preset, const Settings& settings) {
  TrainerOptions options;
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
  options.seed = settings.seed;
  return options;
}

int fail(const absl::Status& status) {
  std::fprintf(stderr, "baton train: %s\n", std::string(status.message()).c_str());
  return 1;
}

int train(const Settings& settings) {
  const auto preset = std::find_if(std::begin(kPresets), std::end(kPresets),
                                   [&](const Preset& p) { return p.name == settings.preset; });
  absl::StatusOr<std::string> text =
      settings.data.empty() ? read_king_james() : read_file(settings.data);
  if (!text.ok()) return fail(text.status());
  std::printf("learning %d tokens from %.2f MB of text\n", preset->vocab,
              static_cast<double>(text->size()) / 1e6);
  absl::StatusOr<Tokenizer> tokenizer = train_bpe(Corpus::training_text(*text), preset->vocab);
  if (!tokenizer.ok()) return fail(tokenizer.status());
  const Corpus corpus = Corpus::make(*text, *tokenizer);
  const TrainerOptions options = options_for(*preset, settings);
  const int cpus = static_cast<int>(std::thread::hardware_concurrency());
  ComputePool pool(settings.threads > 0 ? settings.threads : cpus);
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::create(options, corpus, pool);
  if (!trainer.ok()) return fail(trainer.status());
  std::printf("%.2f M parameters, %.2f M training tokens, %d steps of %d tokens, %d threads\n",
              static_cast<double>((*trainer)->map().size) / 1e6,
              static_cast<double>(corpus.train.size()) / 1e6, options.optimizer.steps,
              options.batch_tokens, pool.size());
  if (absl::Status status = make_directories(settings.out); !status.ok()) return fail(status);

  const auto begin = std::chrono::steady_clock::now();
  const int steps = options.optimizer.steps;
  for (int step = 0; step < steps; ++step) {
    const StepReport report = (*trainer)->step(step);
    const bool last = step + 1 == steps;
    if (step % 20 != 0 && !last) continue;
    const double seconds = Seconds(std::chrono::steady_clock::now() - begin).count();
    const double rate = (step + 1) / seconds;
    std::string held_out;
    if ((step % 200 == 0 && step > 0) || last) {
      char note[64];
      std::snprintf(note, sizeof note, "  held out %.3f bits/byte",
                    (*trainer)->held_out_bits_per_byte(last ? 1 << 20 : 16, last));
      held_out = note;
    }
    std::printf("step %4d/%d  loss %.3f  norm %.2f  rate %.1e  %.1f k tokens/s  %.0f s left%s\n",
                step + 1, steps, report.loss, report.norm, report.rate,
                rate * options.batch_tokens / 1e3, (steps - step - 1) / rate, held_out.c_str());
    std::fflush(stdout);
  }
  if (absl::Status status = save_checkpoint(settings.out, (*trainer)->checkpoint(), &*tokenizer);
      !status.ok()) {
    return fail(status);
  }
  std::printf("saved %s\n", settings.out.c_str());
  return 0;
}

}  // namespace

int train_main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Trains a small Llama on text and writes a Hugging Face directory.", "baton train");
  app.add_option("--preset", settings.preset, "nano (0.8 M parameters) or small (1.8 M)")
      ->check(CLI::IsMember({"nano", "small"}))
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "how many, of 4096 tokens each (default: the preset's)")
      ->check(CLI::PositiveNumber);
  app.add_option("--out", settings.out, "directory to write")->capture_default_str();
  app.add_option("--data", settings.data, "text file (default: Debian's bible-kjv)");
  app.add_option("--threads", settings.threads, "default: one per CPU")->check(CLI::PositiveNumber);
  app.add_option("--seed", settings.seed, "of weights and data order")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return train(settings);
}

}  // namespace baton
