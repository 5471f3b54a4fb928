// Training on this machine's GPU: the CPU's losses and weights to the bit, how many tokens a second
// that is, and how much of two processes' communication backward passes hide.
#include <spawn.h>

#include "collectives/launch.h"
#include "collectives/rendezvous.h"
#include "engine/train/device/device_runner.h"
#include "engine/train/trainer.h"
#include "gpudirect/driver.h"
#include "gpudirect/kernels/image.h"
#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr TrainDevice kFirstDevice{.cuda = true, .ordinal = 0};

class TrainingOnThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (gpudirect::kernels::image().empty()) {
      GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    }
    char name[64] = {};
    int device = 0;
    ASSERT_EQ((*driver)->cuDeviceGet(&device, 0), gpudirect::kSuccess);
    ASSERT_EQ((*driver)->cuDeviceGetName(name, sizeof name, device), gpudirect::kSuccess);
    emulated_ = std::string(name) == "Fake GPU";
    std::string text;
    for (int i = 0; i < 3000; ++i) {
      text +=
          "And it came to pass in the " + std::to_string(i % 7) + " year, that the king said.\n";
    }
    corpus_ = Corpus::make(text, make_test_tokenizer());
  }
  TrainerOptions options(int steps) const {
    TrainerOptions out;
    out.model = tiny_model_config();
    out.optimizer.steps = steps;
    out.optimizer.warmup_steps = 2;
    out.batch_tokens = 64;
    out.length = out.long_length = 32;
    if (emulated_) return out;
    ModelConfig& model = out.model;
    model.hidden_size = 512;
    model.intermediate_size = 1408;
    model.num_layers = 6;
    model.num_heads = 8;
    model.num_kv_heads = 4;
    model.head_dim = 64;
    model.vocab_size = 4096;
    out.batch_tokens = 8192;
    out.length = out.long_length = 512;
    return out;
  }
  // The steps' times but the first one's, and everything else that they report.
  struct Steps {
    std::vector<float> numbers, weights;
    Time took{}, exposed{};
  };
  Steps train(const TrainerOptions& options, int steps, Communicator* comm = nullptr) const {
    Steps out;
    ComputePool pool(0);
    auto trainer = Trainer::create(options, corpus_, pool, comm);
    EXPECT_TRUE(trainer.ok()) << trainer.status();
    if (!trainer.ok()) return out;
    for (int step = 0; step < steps; ++step) {
      const auto report = (*trainer)->step(step);
      EXPECT_TRUE(report.ok()) << report.status();
      if (!report.ok()) return out;
      out.numbers.insert(out.numbers.end(), {report->loss, report->norm});
      if (step == 0) continue;
      out.took += report->took;
      out.exposed += report->exposed;
    }
    EXPECT_TRUE((*trainer)->finish().ok());
    out.weights.assign((*trainer)->parameters(), (*trainer)->parameters() + (*trainer)->map().size);
    return out;
  }
  static std::string shape(const TrainerOptions& options) {
    return absl::StrFormat("%.1f M parameters, %d tokens",
                           static_cast<double>(ParameterMap(options.model).size) / 1e6,
                           options.batch_tokens);
  }

  bool emulated_ = false;
  Corpus corpus_;
};

TEST_F(TrainingOnThisMachine, HasTheCpusLossesAndWeights) {
  constexpr int kCompared = 3;
  TrainerOptions own = options(kCompared);
  const Steps cpu = train(own, kCompared);
  own.runner = run_on(kFirstDevice, 0);
  const Steps gpu = train(own, kCompared);
  EXPECT_EQ(gpu.numbers, cpu.numbers);
  EXPECT_EQ(gpu.weights, cpu.weights);
  // More of them for a time that means something.
  const int timed = emulated_ ? 3 : 20;
  own.optimizer.steps = timed;
  const Steps more = train(own, timed);
  const double each = Seconds(more.took).count() / (timed - 1);
  const double of_cpu = Seconds(cpu.took).count() / (kCompared - 1) / each;
  std::printf(
      R"(row {"name": "train step", "shape": "%s", "us": %.0f, "tokens/s": %.0f, "times the CPU": %.2f})"
      "\n",
      shape(own).c_str(), each * 1e6, own.batch_tokens / each, of_cpu);
}

// One of two: this program again, with this test alone.
TEST_F(TrainingOnThisMachine, DISABLED_IsARank) {
  const auto place = launch::from_environment();
  ASSERT_TRUE(place.ok() && place->has_value());
  CommunicatorOptions group;
  group.rank = (*place)->rank;
  group.ranks = (*place)->ranks;
  group.rendezvous = (*place)->rendezvous;
  group.background = true;
  group.ordered = true;
  auto comm = must(Communicator::create(group));
  const int steps = emulated_ ? 3 : 12;
  TrainerOptions own = options(steps);
  own.runner = run_on(kFirstDevice, 0);
  const Steps hidden = train(own, steps, comm.get());
  own.parallel.overlap = false;
  const Steps serial = train(own, steps, comm.get());
  EXPECT_EQ(hidden.weights, serial.weights);
  if (group.rank == 0) {
    const auto each = [&](Time time) { return Seconds(time).count() / (steps - 1) * 1e6; };
    const double all = std::max(each(serial.took), 1.0);
    std::printf(
        R"(row {"name": "train overlap", "shape": "2 processes, %s", "us": %.0f, "us without overlap": %.0f, )"
        R"("exposed us": %.0f, "exposed us without overlap": %.0f, "of its time": %.3f, "same_device": true})"
        "\n",
        shape(own).c_str(), each(hidden.took), all, each(hidden.exposed), each(serial.exposed),
        each(hidden.took) / all);
    std::fflush(stdout);
  }
  EXPECT_TRUE(comm->barrier().ok());
}

TEST_F(TrainingOnThisMachine, TwoProcessesOnOneGpu) {
  const auto key = must(ClusterKey::for_this_user());
  const auto server = must(collectives::RendezvousServer::start(key, "", 0, 2));
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> texts;
    for (char** one = environ; *one != nullptr; ++one) texts.emplace_back(*one);
    texts.insert(texts.begin(), {absl::StrCat("BATON_RANK=", rank), "BATON_RANKS=2",
                                 absl::StrCat("BATON_RENDEZVOUS=", server->address())});
    std::vector<char*> environment;
    for (std::string& text : texts) environment.push_back(text.data());
    environment.push_back(nullptr);
    std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::string filter = "--gtest_filter=TrainingOnThisMachine.DISABLED_IsARank";
    std::string also = "--gtest_also_run_disabled_tests";
    char* const arguments[] = {self.data(), filter.data(), also.data(), nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, self.c_str(), nullptr, nullptr, arguments, environment.data()),
              0);
    ranks.push_back(child);
  }
  for (const pid_t rank : ranks) {
    int how = 0;
    ASSERT_EQ(waitpid(rank, &how, 0), rank);
    EXPECT_EQ(how, 0);
  }
}

}  // namespace
}  // namespace baton::engine::train
