// Training on a device of the fake driver: losses, norms, weights and moments are the CPU's, to the
// bit, alone and among ranks; whatever call of the driver fails, it is said.
#include <barrier>

#include "collectives/rendezvous.h"
#include "engine/train/device/device_runner.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_train/train_fixture.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

using gpudirect::FakeDriver;
using gpudirect::InstalledFake;
using ::testing::HasSubstr;

constexpr int kSteps = 3;  // the last with long sequences

MakeRunner on_fake(int ordinal = 0) {
  return [ordinal](const RunnerNeeds& needs) -> absl::StatusOr<std::unique_ptr<TrainRunner>> {
    auto driver = gpudirect::load_driver(FakeDriver::get_proc_address());
    if (!driver.ok()) return driver.status();
    auto gpu = device::Gpu::open(*driver, ordinal, FakeDriver::image());
    if (!gpu.ok()) return gpu.status();
    return DeviceRunner::create(*std::move(gpu), needs);
  };
}

// Little to emulate: a short text, and 128 tokens in a step.
const Corpus& text() {
  static const Corpus corpus =
      Corpus::make(verses().substr(0, 24 << 10), TinyText::get().tokenizer);
  return corpus;
}
TrainerOptions small_options(int steps) {
  TrainerOptions options = tiny_options(steps);
  options.batch_tokens = 128;
  return options;
}

// Everything that a run says and leaves behind, but for times.
struct Outcome {
  std::vector<float> numbers;  // loss, norm and rate of every step
  std::vector<double> bits;    // held out: of weights, and of rounded ones
  std::vector<float> weights, state;
};

Outcome train_alone(const TrainerOptions& options, int steps = kSteps) {
  Outcome out;
  ComputePool pool(1);
  auto made = Trainer::create(options, text(), pool);
  EXPECT_TRUE(made.ok()) << made.status();
  if (!made.ok()) return out;
  Trainer& trainer = **made;
  for (int step = 0; step < steps; ++step) {
    const auto report = trainer.step(step);
    EXPECT_TRUE(report.ok()) << report.status();
    if (report.ok()) {
      out.numbers.insert(out.numbers.end(), {report->loss, report->norm, report->rate});
    }
  }
  for (const bool rounded : {false, true}) {
    out.bits.push_back(trainer.held_out_bits_per_byte(2, rounded).value());
  }
  out.weights = weights_of(trainer);
  ShardState state;
  EXPECT_TRUE(trainer.save(steps, state).ok());
  out.state.assign(state.values.data(), state.values.data() + state.values.size());
  return out;
}

void expect_same(const Outcome& device, const Outcome& cpu) {
  EXPECT_EQ(device.numbers, cpu.numbers);
  EXPECT_EQ(device.bits, cpu.bits);
  EXPECT_EQ(device.weights, cpu.weights);
  EXPECT_EQ(device.state, cpu.state);
}

void expect_the_cpus(TrainerOptions options) {
  const Outcome cpu = train_alone(options);
  FakeDriver fake;
  options.runner = on_fake();
  expect_same(train_alone(options), cpu);
  EXPECT_THAT(fake.finish(), testing::IsEmpty());
}

TEST(DeviceTrain, HasTheCpusBits) { expect_the_cpus(small_options(kSteps)); }

TEST(DeviceTrain, HasTheCpusBitsWithAnOutputOfItsOwn) {
  TrainerOptions options = small_options(kSteps);
  options.model.tie_word_embeddings = false;
  options.model.num_layers = 1;
  // More than one block of attention's rows, the last of them shorter.
  options.batch_tokens = 160;
  options.length = 80;
  options.long_length = 160;
  expect_the_cpus(options);
}

TEST(DeviceTrain, HasTheCpusBitsInMicroBatches) {
  TrainerOptions options = small_options(kSteps);
  options.length = options.long_length = 32;
  options.parallel.accumulate = 4;
  expect_the_cpus(options);
}

TEST(DeviceTrain, GoesOnFromWhatTheCpuSavedAndTheOtherWayRound) {
  const TrainerOptions cpu = small_options(kSteps);
  const Outcome whole = train_alone(cpu);
  FakeDriver fake;
  TrainerOptions device = cpu;
  device.runner = on_fake();
  for (const bool begins_on_device : {false, true}) {
    ComputePool pool(1);
    ShardState state;
    {
      auto first = must(Trainer::create(begins_on_device ? device : cpu, text(), pool));
      run_steps(*first, 0, 2);
      ASSERT_TRUE(first->save(2, state).ok());
    }
    auto second = must(Trainer::create(begins_on_device ? cpu : device, text(), pool));
    ASSERT_TRUE(second->load(state).ok());
    run_steps(*second, 2, 3);
    EXPECT_EQ(weights_of(*second), whole.weights);
  }
  EXPECT_THAT(fake.finish(), testing::IsEmpty());
}

TEST(DeviceTrain, RefusesWhatADeviceDoesNotHave) {
  FakeDriver fake({.memory_bytes = 4 << 20});
  ComputePool pool(1);
  TrainerOptions options = small_options(kSteps);
  options.runner = on_fake();
  const auto error = [&] {
    return std::string(Trainer::create(options, text(), pool).status().message());
  };
  options.parallel.wire = DataType::kBF16;
  EXPECT_THAT(error(), HasSubstr("--wire bf16"));
  options.parallel.wire = DataType::kF32;
  EXPECT_THAT(error(), HasSubstr("--accumulate"));
  options.model.vocab_size = 65536;
  EXPECT_THAT(error(), HasSubstr("parameters, gradients or moments"));
  EXPECT_THAT(fake.finish(), testing::IsEmpty());
}

struct DeviceVariant {
  const char* name;
  int zero;
  bool overlap;
  int devices;  // the second rank's is the CPU if there is but one
  int accumulate = 1;
};
class DeviceRanks : public ::testing::TestWithParam<DeviceVariant> {};

// Gradients and weights go from device to device, or to ranks on CPUs, by the same calls.
// Promise(training): On a GPU, losses, norms and weights are the CPU's bits | every kernel adds in
//   the CPU's order
TEST_P(DeviceRanks, HaveTheBitsOfCpus) {
  TrainerOptions options = small_options(kSteps);
  options.length = options.long_length = 32;
  options.parallel.accumulate = GetParam().accumulate;
  const std::vector<float> expected = train_ranks(2, options, kSteps, text())[0];
  options.parallel.zero = GetParam().zero;
  options.parallel.overlap = GetParam().overlap;
  options.parallel.bucket_bytes = 1;
  InstalledFake gpu({.devices = 2});
  // Both ranks are one process here: it loads all kernels before it launches any.
  for (int d = 0; d < GetParam().devices; ++d) {
    ASSERT_TRUE(gpu.memory().staging_ring(d, 4 << 20).ok());
  }
  std::barrier opened(GetParam().devices);
  run_ranks(2, [&](Communicator* comm, int rank) {
    TrainerOptions own = options;
    if (rank < GetParam().devices) {
      own.runner = [&opened, rank](const RunnerNeeds& needs) {
        auto runner = on_fake(rank)(needs);
        opened.arrive_and_wait();
        return runner;
      };
    }
    ComputePool pool(1);
    auto trainer = must(Trainer::create(own, text(), pool, comm));
    run_steps(*trainer, 0, kSteps);
    EXPECT_EQ(weights_of(*trainer), expected);
    EXPECT_EQ(comm->stats().staged_calls > 0, rank < GetParam().devices);
  });
  gpu.expect_clean();
}

// Under a sanitizer one of two devices and one of a device and a CPU, with and without zero.
std::vector<DeviceVariant> device_variants() {
  std::vector<DeviceVariant> all = {{"TwoDevices", 0, true, 2, 2},
                                    {"ADeviceAndACpuZero", 1, false, 1},
                                    {"TwoDevicesZero", 1, true, 2},
                                    {"ADeviceAndACpu", 0, false, 1}};
  if (kSanitized) all.resize(2);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Variants, DeviceRanks, ::testing::ValuesIn(device_variants()),
                         [](const auto& test) { return test.param.name; });

// The first ranges of a pass are told while the later ones are still to be computed.
TEST(DeviceTrain, TellsOfGradientsWhileTheBackwardPassGoesOn) {
  FakeDriver fake;
  const TrainerOptions options = small_options(kSteps);
  const ParameterMap map(options.model);
  auto runner = must(on_fake()({map, options.optimizer, {{0, map.size}}, map.size, 64, 32}));
  {
    FlatArray parameters = runner->make_array(map.size, true).value();
    FlatArray gradients = runner->make_array(map.size, true).value();
    const std::vector<int32_t> tokens(33, 7);
    std::vector<size_t> queued;
    size_t done = 0;
    const auto ready = [&](size_t begin, size_t end) {
      EXPECT_EQ(begin, done);
      done = end;
      queued.push_back(fake.queued());
    };
    const GradientSums sums{gradients.data(), gradients.data()};
    ASSERT_TRUE(
        runner->loss_and_gradients(parameters.data(), tokens, 1, 32, sums, ready, nullptr).ok());
    EXPECT_EQ(done, map.size);
    EXPECT_GT(queued.front(), 10u);
    EXPECT_EQ(queued.back(), 0u);
    // A pass that fails leaves nothing on the stream: the arrays may be others' soon.
    fake.fail_next("cuLaunchKernel", gpudirect::kOutOfMemory);
    EXPECT_FALSE(runner->loss(parameters.data(), tokens, 1, 32).ok());
    EXPECT_EQ(fake.queued(), 0u);
  }
  runner = nullptr;
  EXPECT_THAT(fake.finish(), testing::IsEmpty());
}

// At start and in a step: an error in words or nothing lost, and nothing left behind.
TEST(DeviceTrain, SaysWhicheverCallFails) {
  TrainerOptions options = small_options(1);
  options.model.num_layers = 1;
  options.batch_tokens = options.length = options.long_length = 16;
  options.runner = on_fake();
  int failed = 0, fine = 0;
  for (uint64_t call = 1; fine == 0 && call < 4000; call += call < 40 ? 1 : kSanitized ? 21 : 7) {
    FakeDriver fake;
    fake.fail_call_in(call, gpudirect::kOutOfMemory);
    {
      ComputePool pool(1);
      auto trainer = Trainer::create(options, text(), pool);
      absl::Status status = trainer.status();
      if (status.ok()) status = (*trainer)->step(0).status();
      if (status.ok()) status = (*trainer)->finish();
      if (status.ok() && fake.calls() < call) ++fine;
      if (!status.ok()) {
        ++failed;
        EXPECT_NE(status.message(), "");
      }
    }
    for (const std::string& wrong : fake.finish())
      ADD_FAILURE() << "call " << call << ": " << wrong;
  }
  EXPECT_GT(failed, 40);
  EXPECT_EQ(fine, 1) << "no run came to its end";
}

// One rank on a device that is lost, the other one on its CPU: neither waits for the other.
TEST(DeviceTrain, ALostDeviceEndsEveryRank) {
  InstalledFake gpu;
  const ClusterKey key = ClusterKey::for_this_user().value();
  auto server = must(collectives::RendezvousServer::start(key, "", 0, 2));
  std::vector<absl::Status> ended(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      RunOptions run;
      run.trainer = small_options(6);
      run.threads = 1;
      if (rank == 0) {
        run.trainer.runner = on_fake();
        run.after_step = [&](int step) {
          if (step == 1) gpu.fake().lose();
        };
      }
      launch::Place place;
      place.rank = rank;
      place.ranks = 2;
      place.rendezvous = server->address();
      ended[static_cast<size_t>(rank)] = run_rank(run, text(), place);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(std::string(ended[0].message()), HasSubstr("CUDA"));
  EXPECT_THAT(std::string(ended[1].message()), AllOf(HasSubstr("rank 0"), HasSubstr("CUDA")));
}

// A rank is killed; the one that takes its place has a device anew, and its part from its
// neighbour's memory.
TEST(DeviceTrain, ARankThatIsKilledIsReplaced) {
  const TemporaryFolder folder;
  const std::string file = folder.path("weights");
  TrainerOptions options = small_options(5);
  options.length = options.long_length = 32;
  options.parallel.accumulate = 2;
  const std::vector<float> expected = train_ranks(1, options, 5, text())[0];
  options.parallel.accumulate = 1;
  RunOptions run = recovering_run(options, file);
  run.trainer.runner = on_fake();
  const auto result = must(launch::fork_ranks(
      {.ranks = 2, .restart = true}, [&](const launch::Place& place, int restarts) {
        const InstalledFake gpu;
        run.after_step = [&](int step) {
          if (restarts == 0 && place.rank == 1 && step == 2) ::kill(getpid(), SIGKILL);
        };
        const absl::Status status = run_rank(run, text(), place);
        if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
        return status.ok() ? 0 : 1;
      }));
  ASSERT_EQ(result, 0);
  expect_weights(file, expected);
}

}  // namespace
}  // namespace baton::engine::train
