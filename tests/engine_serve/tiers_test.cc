// KV tiers below an engine: the same tokens as without them, whatever becomes of what they hold.
#include "engine/serve/engine.h"
#include "tests/engine_serve/damaged_files.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/engine_serve/sessions.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::serve::tiers {
namespace {

constexpr size_t kRequests = 120;

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(31, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

EngineOptions with(KvTierOptions tiers, uint32_t blocks = 40) {
  return {.blocks = blocks, .token_budget = 40, .max_sequences = 6, .tiers = std::move(tiers)};
}

KvTierOptions host() { return {.host_bytes = 64 << 20}; }
KvTierOptions disk(const TemporaryFolder& folder) {
  return {.disk = folder.path("kv"), .disk_bytes = 16 << 20};
}

// All requests, at most `in_flight` at a time; then everything is counted. kSaveAll: no block is
// written over before the tiers have it, however slow they are.
enum Saving { kSaveAll, kSaveWhatIsQuickEnough };
std::map<uint64_t, Outcome> run_all(Engine& engine, size_t in_flight, Saving saving = kSaveAll) {
  std::map<uint64_t, Outcome> outcomes = serve::run_all(engine, requests(), in_flight, [&] {
    if (saving == kSaveAll && engine.tiers() != nullptr) engine.tiers()->flush();
  });
  EXPECT_TRUE(engine.check_integrity().ok()) << engine.check_integrity();
  EXPECT_EQ(engine.stats().free_blocks, engine.stats().blocks);
  return outcomes;
}

std::unique_ptr<Engine> make(EngineOptions options, const Model& model = test_model()) {
  return *Engine::create(model, test_tokenizer(), std::move(options));
}

// In the second run prompts that the small cache has forgotten are loaded. Many at once preempt
// each other; one at a time waits for its layers.
void expect_nothing_changes(const KvTierOptions& tiers) {
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    const Model& model = test_model(arithmetic);
    const std::map<uint64_t, Outcome> alone = run_one_at_a_time(requests(), model);
    for (const size_t in_flight : {30, 1}) {
      SCOPED_TRACE(absl::StrCat(arithmetic_name(arithmetic), ", ", in_flight, " in flight"));
      EngineOptions options = with(tiers, 26);
      options.token_budget = 16;
      auto engine = make(options, model);
      for (Saving saving : {kSaveAll, kSaveWhatIsQuickEnough}) {
        expect_same(alone, run_all(*engine, in_flight, saving));
      }
      EXPECT_EQ(engine->stats().preemptions > 0, in_flight > 1);
      EXPECT_GT(engine->stats().tier_tokens, 500u);
      EXPECT_EQ(engine->stats().loads_failed, 0u);
    }
  }
}

// Promise(tiers): Tokens are the same with and without each tier | a block comes back as saved, or
//   is computed
TEST(KvTiers, HostMemoryChangesNothing) { expect_nothing_changes(host()); }

TEST(KvTiers, DiskChangesNothing) {
  const TemporaryFolder folder;
  expect_nothing_changes(disk(folder));
}

// One directory for all of them, one after the other: each finds what it wrote itself alone.
TEST(KvTiers, AnotherArithmeticFindsNothing) {
  const TemporaryFolder folder;
  const auto run = [&](Arithmetic arithmetic) {
    auto engine = make(with(disk(folder), 400), test_model(arithmetic));
    run_all(*engine, 6);
    EXPECT_GT(engine->stats().tiers.disk_records, 100u);
    return engine->stats().tier_tokens;
  };
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    EXPECT_EQ(run(arithmetic), 0u) << arithmetic_name(arithmetic);
  }
  EXPECT_GT(run(Arithmetic::kBf16), 500u);
}

TEST(KvTiers, DamagedFilesAreMisses) {
  const TemporaryFolder folder;
  {
    auto first = make(with(disk(folder)));
    run_all(*first, 6);
  }
  damage(folder.path("kv"));
  auto second = make(with(disk(folder)));
  EXPECT_GT(second->stats().tiers.disk_records, 100u);
  expect_same(expected(), run_all(*second, 6));
  EXPECT_GT(second->stats().tiers.corrupt, 0u);
}

// While the engine runs: what it believes to have is not there any more.
TEST(KvTiers, FilesThatAreDamagedMeanwhileAreMisses) {
  const TemporaryFolder folder;
  auto engine = make(with(disk(folder)));
  run_all(*engine, 6);
  damage(folder.path("kv"));
  expect_same(expected(), run_all(*engine, 6));
  EXPECT_GT(engine->stats().tiers.corrupt, 0u);
  EXPECT_GT(engine->stats().loads_failed, 0u);
}

TEST(KvTiers, AProcessFindsWhatAnEarlierOneOfItsSaltLeftOnDisk) {
  const TemporaryFolder folder;
  KvTierOptions options = disk(folder);
  const auto tokens_found = [&](const char* salt) {
    options.salt = salt;
    auto engine = make(with(options, 400));
    expect_same(expected(), run_all(*engine, 6));
    EXPECT_GT(engine->stats().tiers.disk_records, 100u);
    return engine->stats().tier_tokens;
  };
  EXPECT_EQ(tokens_found("one"), 0u);
  EXPECT_GT(tokens_found("one"), 500u);
  EXPECT_EQ(tokens_found("two"), 0u);
}

TEST(KvTiers, ADirectoryThatCannotBeHadCostsOnlyTheTier) {
  const TemporaryFolder folder;
  std::ofstream(folder.path("kv")) << "a file is in the way";
  auto engine = make(with(disk(folder)));
  expect_same(expected(), run_all(*engine, 6));
}

// Two engines and their sessions.
struct Halves {
  Halves(EngineOptions prefill, EngineOptions decode)
      : from_session(test_session("prefill", "shm", test_model())),
        to_session(test_session("decode", "shm", test_model())) {
    prefill.hand_off = from_session.get();
    decode.hand_off = to_session.get();
    decode.min_remote_tokens = 8;
    from = *Engine::create(test_model(), test_tokenizer(), prefill);
    to = *Engine::create(test_model(), test_tokenizer(), decode);
    remote = requests();
    for (Request& request : remote) request.prefill_address = from->kv_address();
  }
  const std::unique_ptr<handoff::HandOff> from_session, to_session;
  std::unique_ptr<Engine> from, to;
  std::vector<Request> remote;
};

TEST(KvTiers, PrefillWorkersUseThemForOthers) {
  EngineOptions decode = with({}, 128);
  decode.prefix_cache = false;
  Halves pair(with(host(), 64), decode);
  for (int round = 0; round < 2; ++round) {
    std::map<uint64_t, Outcome> outcomes;
    for (const Request& request : pair.remote) {
      EXPECT_TRUE(submit(*pair.to, request, &outcomes[request.id]).ok());
    }
    until([&] { return !pair.to->has_work() && !pair.from->owes_others(); },
          [&] {
            pair.to->step();
            pair.from->step();
            pair.from->tiers()->flush();
          },
          [&] { return state_of(*pair.to) + state_of(*pair.from); });
    expect_same(expected(), outcomes);
  }
  EXPECT_GT(pair.from->tiers()->stats().loaded, 50u);
  EXPECT_TRUE(pair.from->check_integrity().ok()) << pair.from->check_integrity();
}

// What a prefill worker has sent is saved too, and comes back without it: in a batch, and alone.
TEST(KvTiers, DecodeWorkersUseThemBesideTheirPrefillWorkers) {
  Halves pair(with({}, 128), with(host(), 64));
  uint64_t loaded = 0;
  for (size_t in_flight : {kRequests, size_t{1}}) {
    expect_same(expected(), serve::run_all(*pair.to, pair.remote, in_flight, [&] {
                  pair.from->step();
                  pair.to->tiers()->flush();
                }));
    finish_all(*pair.from);
    if (loaded == 0) loaded = pair.to->stats().loaded_tokens;
  }
  EXPECT_GT(loaded, 500u);
  EXPECT_GT(pair.to->stats().tier_tokens, 500u);
  EXPECT_TRUE(pair.to->check_integrity().ok()) << pair.to->check_integrity();
  EXPECT_TRUE(pair.from->check_integrity().ok()) << pair.from->check_integrity();
}

TEST(KvTiers, NeedThePrefixCache) {
  EngineOptions options = with(host());
  options.prefix_cache = false;
  EXPECT_EQ(Engine::create(test_model(), test_tokenizer(), options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::engine::serve::tiers
