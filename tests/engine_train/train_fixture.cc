// A text, and runs over it.
#include "tests/engine_train/train_fixture.h"

#include "engine/files/files.h"
#include "tests/communicator/group.h"
#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::train {

std::string verses() {
  std::string text;
  for (int i = 0; i < 1500; ++i) {
    text += "And it came to pass in the " + std::to_string(i % 7) + " year, that the king said.\n";
  }
  return text;
}

TinyText::TinyText()
    : tokenizer(make_test_tokenizer()), corpus(Corpus::make(verses(), tokenizer)) {}

const TinyText& TinyText::get() {
  static const TinyText text;
  return text;
}

TrainerOptions tiny_options(int steps) {
  TrainerOptions options;
  options.model = tiny_model_config();
  options.optimizer.steps = steps;
  options.optimizer.warmup_steps = 2;
  options.optimizer.learning_rate = 1e-2f;
  options.batch_tokens = 256;
  options.length = 32;
  options.long_length = 64;
  return options;
}

void run_ranks(int ranks, const std::function<void(Communicator*, int rank)>& body) {
  if (ranks == 1) return body(nullptr, 0);
  CommunicatorOptions options;
  options.worker.key = test_key();
  options.ordered = options.background = true;
  options.calibrate = false;
  run_group(ranks, options, [&](Communicator& comm) {
    body(&comm, comm.rank());
    EXPECT_TRUE(comm.barrier().ok());  // nobody leaves while others still read
  });
}

void run_steps(Trainer& trainer, int from, int to) {
  for (int step = from; step < to; ++step) {
    must(trainer.step(step));
  }
}

std::vector<float> weights_of(Trainer& trainer) {
  EXPECT_TRUE(trainer.finish().ok());
  return {trainer.parameters(), trainer.parameters() + trainer.map().size};
}

std::vector<std::vector<float>> train_ranks(int ranks, const TrainerOptions& options, int steps,
                                            const Corpus& corpus) {
  std::vector<std::vector<float>> weights(ranks);
  run_ranks(ranks, [&](Communicator* comm, int rank) {
    ComputePool pool(1);
    auto trainer = must(Trainer::create(options, corpus, pool, comm));
    run_steps(*trainer, 0, steps);
    weights[rank] = weights_of(*trainer);
  });
  return weights;
}

RunOptions recovering_run(const TrainerOptions& options, const std::string& file) {
  RunOptions run;
  run.trainer = options;
  run.trainer.parallel.zero = 1;
  run.threads = 1;
  run.ordered = true;
  run.recover = true;
  run.done = [file](const Trainer& trainer) {
    const auto* bytes = reinterpret_cast<const char*>(trainer.parameters());
    return write_file_atomically(file, std::string_view(bytes, trainer.map().size * sizeof(float)));
  };
  return run;
}

void expect_weights(const std::string& file, const std::vector<float>& expected) {
  const auto bytes = must(read_file(file));
  ASSERT_EQ(bytes.size(), expected.size() * sizeof(float));
  std::vector<float> weights(expected.size());
  std::memcpy(weights.data(), bytes.data(), bytes.size());
  EXPECT_EQ(weights, expected);
}

}  // namespace baton::engine::train
