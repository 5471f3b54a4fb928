// A small text, a tiny model, and groups of ranks on threads of this process.
#pragma once

#include "collectives/communicator.h"
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
void run_ranks(int ranks, bool ordered, const std::function<void(Communicator*, int rank)>& body);

// Trains and returns the weights of every rank, without padding.
std::vector<std::vector<float>> train_ranks(int ranks, const TrainerOptions& options, int steps,
                                            bool ordered = true);

}  // namespace baton::engine::train
