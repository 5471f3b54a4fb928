// Ranks on threads meet at a rendezvous of their own.
#include "tests/engine_train/train_fixture.h"

#include "collectives/rendezvous.h"
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
  const ClusterKey key = ClusterKey::for_this_user().value();
  auto server = collectives::RendezvousServer::start(key, "", 0, static_cast<uint32_t>(ranks));
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      CommunicatorOptions options;
      options.rank = rank;
      options.ranks = ranks;
      options.rendezvous = (*server)->address();
      options.ordered = true;
      options.background = true;
      options.calibrate = false;
      auto comm = Communicator::create(options);
      ASSERT_TRUE(comm.ok()) << comm.status();
      body(comm->get(), rank);
      EXPECT_TRUE((*comm)->barrier().ok());  // nobody leaves while others still read
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_steps(Trainer& trainer, int from, int to) {
  for (int step = from; step < to; ++step) {
    const auto report = trainer.step(step);
    ASSERT_TRUE(report.ok()) << report.status();
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
    auto trainer = Trainer::create(options, corpus, pool, comm);
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    run_steps(**trainer, 0, steps);
    weights[rank] = weights_of(**trainer);
  });
  return weights;
}

}  // namespace baton::engine::train
