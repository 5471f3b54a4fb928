// A small text, a tiny model, and groups of ranks on threads of this process.
#pragma once

#include "collectives/communicator.h"
#include "engine/train/train_run.h"
#include "engine/train/trainer.h"
#include "tests/std.h"

namespace baton::engine::train {

std::string verses();

// Text, tokenizer and corpus, made once per process.
struct TinyText {
  TinyText();
  Tokenizer tokenizer;
  Corpus corpus;
  static const TinyText& get();
};

// 20 KB of parameters, 256 tokens per step in sequences of 32 and later 64.
TrainerOptions tiny_options(int steps);

// Runs `body` as rank 0 .. ranks - 1, each on a thread of its own with its communicator, which is
// null if there is but one rank. Fails the test if they cannot meet.
void run_ranks(int ranks, const std::function<void(Communicator*, int rank)>& body);

// Steps `from` to `to`, without the last; and the weights then, without padding.
void run_steps(Trainer& trainer, int from, int to);
std::vector<float> weights_of(Trainer& trainer);

// Trains in order and returns the weights of every rank, without padding.
std::vector<std::vector<float>> train_ranks(int ranks, const TrainerOptions& options, int steps,
                                            const Corpus& corpus = TinyText::get().corpus);

// A run of ranks that are replaced when they are killed; at its end the weights are in `file`.
RunOptions recovering_run(const TrainerOptions& options, const std::string& file);
void expect_weights(const std::string& file, const std::vector<float>& expected);

}  // namespace baton::engine::train
