// An engine whose steps a device computes: the tokens of the CPU's, alone, in batches, and with the
// prompt computed on one and continued on the other.
#include "tests/engine_device/device_rig.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/engine_serve/sessions.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using gpudirect::CleanFake;

constexpr size_t kRequests = 10;

const std::vector<Request>& requests() {
  static const auto* list = [] {
    auto* made = new std::vector<Request>(random_requests(5, kRequests));
    for (Request& request : *made) {
      SamplingParams& sampling = request.sampling;
      sampling.max_tokens = std::min(sampling.max_tokens, 8);
      // What the device leaves to the Sampler, among what it draws itself.
      if (request.id % 4 == 0) sampling.presence_penalty = 1.5;
      if (request.id % 4 == 1) sampling.min_p = 0.3;
      if (request.id % 4 == 2) sampling.logprobs = 2;
    }
    return made;
  }();
  return *list;
}
const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}
Checkpoint checkpoint() { return make_test_checkpoint(tiny_model_config(), 1); }

// A model that a device computes, or the CPU.
struct Half {
  explicit Half(bool on_device) {
    if (!on_device) return;
    runner = *device::on_fake(checkpoint());
    described.emplace(*Model::describe(checkpoint(), "fp32"));
  }
  const Model& model() const { return described.has_value() ? *described : test_model(); }
  std::unique_ptr<device::DeviceModel> runner;
  std::optional<Model> described;
};

TEST(DeviceEngine, SameTokensAsTheCpus) {
  CleanFake driver;
  const Half half(true);
  auto engine = must(Engine::create(
      half.model(), test_tokenizer(),
      {.blocks = 40, .token_budget = 48, .max_sequences = 4, .runner = half.runner.get()}));
  std::map<uint64_t, Outcome> outcomes;
  for (const Request& request : requests()) {
    ASSERT_TRUE(submit(*engine, request, &outcomes[request.id]).ok());
  }
  finish_all(*engine);
  expect_same(expected(), outcomes);
  EXPECT_TRUE(engine->check_integrity().ok());
}

struct Case {
  const char* provider;
  bool prefill_on_device;
  bool decode_on_device;
  bool push = false;
};
class DevicePair : public testing::TestWithParam<Case> {};

TEST_P(DevicePair, SameTokensAsOneEngine) {
  const Case& given = GetParam();
  CleanFake driver;  // engines end first, then what moved their memory, then the memory
  const Half left(given.prefill_on_device), right(given.decode_on_device);
  const auto from = test_session("prefill", given.provider, left.model()),
             to = test_session("decode", given.provider, right.model());
  auto prefill = must(Engine::create(
      left.model(), test_tokenizer(),
      {.blocks = 64, .token_budget = 64, .hand_off = from.get(), .runner = left.runner.get()}));
  auto decode = must(Engine::create(right.model(), test_tokenizer(),
                                    {.blocks = 48,
                                     .token_budget = 48,
                                     .max_sequences = 4,
                                     .min_remote_tokens = 8,
                                     .hand_off = to.get(),
                                     .push = given.push,
                                     .runner = right.runner.get()}));
  std::map<uint64_t, Outcome> outcomes;
  for (Request request : requests()) {
    request.prefill_address = prefill->kv_address();
    ASSERT_TRUE(submit(*decode, request, &outcomes[request.id]).ok());
  }
  // One thread takes turns, for the fake has one seed.
  until([&] { return !decode->has_work() && !prefill->owes_others(); },
        [&] {
          bool moved = prefill->step();
          moved |= decode->step();
          if (!moved) decode->wait(std::chrono::microseconds(200), -1);
        },
        [&] { return state_of(*decode) + state_of(*prefill); });
  expect_same(expected(), outcomes);
  EXPECT_EQ(decode->stats().loads_failed, 0u);
  EXPECT_GT(decode->stats().loaded_tokens, 100u);
  EXPECT_TRUE(decode->check_integrity().ok());
  EXPECT_TRUE(prefill->check_integrity().ok());
}

INSTANTIATE_TEST_SUITE_P(Ways, DevicePair,
                         testing::Values(Case{"tcp", true, false}, Case{"tcp", false, true},
                                         Case{"shm", true, true}, Case{"shm", true, false},
                                         Case{"tcp", true, false, true},
                                         Case{"tcp", false, true, true},
                                         Case{"shm", true, true, true}),
                         [](const auto& way) {
                           return std::string(way.param.provider) +
                                  (way.param.prefill_on_device ? "_cuda" : "_cpu") +
                                  (way.param.decode_on_device ? "_to_cuda" : "_to_cpu") +
                                  (way.param.push ? "_pushed" : "");
                         });

// Tensor cores add in an order of their own, so their KV is not a CPU's.
TEST(DeviceEngine, SharesKvWithACpuInFp32Alone) {
  const auto of_device = [](Arithmetic arithmetic) {
    return Model::describe(checkpoint(), device::device_arithmetic(arithmetic))->fingerprint();
  };
  EXPECT_EQ(of_device(Arithmetic::kFp32), test_model().fingerprint());
  EXPECT_NE(of_device(Arithmetic::kBf16), test_model(Arithmetic::kBf16).fingerprint());
  EXPECT_NE(of_device(Arithmetic::kBf16), test_model().fingerprint());
}

// All requests, after one another or at most four at a time; what they need is saved when it can
// be.
void expect_the_cpus_tokens(
    Engine& engine, size_t in_flight, const std::function<void()>& before_each = [] {}) {
  expect_same(expected(), run_all(
                              engine, requests(), in_flight, [&] { engine.tiers()->flush(); },
                              [&](size_t) { before_each(); }));
  EXPECT_TRUE(engine.check_integrity().ok()) << engine.check_integrity();
  EXPECT_EQ(engine.stats().free_blocks, engine.stats().blocks);
}

std::unique_ptr<Engine> with_tiers(const Half& half, KvTierOptions tiers) {
  return must(Engine::create(half.model(), test_tokenizer(),
                             {.blocks = 24,
                              .token_budget = 48,
                              .max_sequences = 4,
                              .tiers = std::move(tiers),
                              .runner = half.runner.get()}));
}

// The second time prompts that the small cache has forgotten are loaded, in several pieces where
// they are longer than what the pinned memory holds.
TEST(DeviceEngine, TiersBelowItsCacheChangeNothing) {
  CleanFake driver;
  const Half half(true);
  const auto engine = with_tiers(half, {.host_bytes = 64 << 20});
  EXPECT_THAT(engine->tiers()->explain(), testing::HasSubstr("of pinned memory"));
  for (const size_t in_flight : {4u, 1u}) expect_the_cpus_tokens(*engine, in_flight);
  EXPECT_GT(engine->stats().tier_tokens, 100u);
  EXPECT_EQ(engine->stats().loads_failed, 0u);
}

// What one has saved is the other's, for its KV has the same bits and the same name.
TEST(DeviceEngine, SharesTiersOnDiskWithTheCpu) {
  for (const bool device_first : {true, false}) {
    CleanFake driver;
    const TemporaryFolder folder;
    const KvTierOptions disk{.disk = folder.path("kv"), .disk_bytes = 16 << 20};
    for (const bool on_device : {device_first, !device_first}) {
      const Half half(on_device);
      const auto engine = with_tiers(half, disk);
      expect_the_cpus_tokens(*engine, 4);
      if (on_device == device_first) continue;
      EXPECT_GT(engine->stats().tier_tokens, 100u);
    }
  }
}

TEST(DeviceEngine, ACopyToOrFromATierThatFailsIsComputed) {
  CleanFake driver;
  const Half half(true);
  const auto engine = with_tiers(half, {.host_bytes = 64 << 20});
  expect_the_cpus_tokens(*engine, 4);
  EXPECT_GT(engine->stats().tiers.saved, 0u);
  // Steps record no events: it is a save or a load that meets the error.
  for (const size_t in_flight : {1u, 4u}) {
    expect_the_cpus_tokens(*engine, in_flight, [&] {
      driver.fake().fail_next("cuEventRecord", gpudirect::kOutOfMemory, 2);
    });
  }
}

// One step fails and the device with it: what the step computed, what waits, and what comes later.
// Promise(serving): A lost GPU stops its engine; a router continues its requests elsewhere | the
//   runner is asked after each step
TEST(DeviceEngine, StopsWithItsDevice) {
  CleanFake driver;
  const Half half(true);
  auto engine = must(Engine::create(
      half.model(), test_tokenizer(),
      {.blocks = 40, .token_budget = 48, .max_sequences = 2, .runner = half.runner.get()}));
  std::map<uint64_t, Outcome> outcomes;
  for (const Request& request : requests()) {
    ASSERT_TRUE(submit(*engine, request, &outcomes[request.id]).ok());
  }
  EXPECT_TRUE(engine->step());
  EXPECT_TRUE(engine->alive().ok());
  EXPECT_FALSE(engine->liveness().stopped());
  driver.fake().fail_next("cuLaunchKernel", static_cast<gpudirect::Result>(719));
  EXPECT_TRUE(engine->step());
  EXPECT_FALSE(engine->has_work());
  EXPECT_TRUE(engine->check_integrity().ok());
  ASSERT_TRUE(engine->liveness().stopped());
  EXPECT_THAT(engine->liveness().why_stopped(), testing::HasSubstr("lost to this process"));
  size_t failed = 0;
  for (const auto& [id, outcome] : outcomes) {
    if (outcome.status.ok()) continue;  // it had ended before
    ++failed;
    EXPECT_TRUE(absl::IsUnavailable(outcome.status)) << outcome.status;
    EXPECT_TRUE(outcome.status.GetPayload(kStoppedPayload).has_value());
  }
  EXPECT_GE(failed, kRequests - 2);
  // The device would do it: such an error leaves a context that nobody may trust.
  Outcome later;
  EXPECT_TRUE(absl::IsUnavailable(submit(*engine, requests()[0], &later)));
  EXPECT_FALSE(engine->step());
}

}  // namespace
}  // namespace baton::engine::serve
