// Prefill and decode servers of any tensor-parallel degrees say what one process says; and what
// goes wrong at any rank is computed again, without a block lost.
#include <map>
#include <random>
#include <set>

#include "engine/shard/kv_address.h"
#include "tests/engine_shard/degrees.h"
#include "tests/test.h"

namespace baton::engine::shard::degrees {
namespace {

using kvtransfer::KvConnector;
using kvtransfer::KvRequestId;
using serve::EngineRole;
using serve::Outcome;
using serve::Request;
using ::testing::HasSubstr;

constexpr size_t kRequests = 40;
// Too small for all: some are preempted, and prompts are computed in many chunks.
constexpr StepLimits kTight{.blocks = 20, .token_budget = 24, .max_sequences = 8};

KnownAnswers& answers() {
  static auto* known = new KnownAnswers(kRequests);
  return *known;
}
const std::vector<Request>& requests() { return answers().requests(); }

// All requests through decode, which asks `address`; some alone, then all at once.
std::map<uint64_t, Outcome> run_all(Server& decode, const std::string& address) {
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < kRequests; ++i) {
    Request request = requests()[i];
    request.prefill_address = address;
    EXPECT_TRUE(submit(decode.engine(), request, &outcomes[i]).ok());
    if (i < 4) decode.finish();
  }
  decode.finish();
  return outcomes;
}

// Nothing is under way, nothing is lost, and all ranks end well.
void expect_clean(Server& server, uint32_t blocks) {
  server.stop();
  const serve::EngineStats stats = server.engine().stats();
  EXPECT_EQ(stats.free_blocks, blocks);
  EXPECT_EQ(stats.quarantined_blocks, 0u);
  EXPECT_TRUE(server.engine().check_integrity().ok()) << server.engine().check_integrity();
  for (const absl::Status& status : server.end()) EXPECT_TRUE(status.ok()) << status;
}

struct Case {
  const char* name;
  int prefill;
  int decode;
  Arithmetic arithmetic;
  const char* provider;
  const Checkpoint& (*checkpoint)() = ranks_checkpoint;
};

class DegreePairs : public testing::TestWithParam<Case> {};

// Promise(kv): Prefill and decode of any two degrees, one dividing the other, give one process's
//   tokens | a plan says which heads go where
TEST_P(DegreePairs, SayWhatOneProcessSays) {
  const Case& given = GetParam();
  Server prefill({.role = EngineRole::kPrefill,
                  .ranks = given.prefill,
                  .limits = kTight,
                  .arithmetic = given.arithmetic,
                  .provider = given.provider,
                  .checkpoint = &given.checkpoint()});
  Server decode({.role = EngineRole::kDecode,
                 .ranks = given.decode,
                 .limits = kTight,
                 .arithmetic = given.arithmetic,
                 .provider = given.provider,
                 .checkpoint = &given.checkpoint()});
  prefill.start();
  expect_same(answers().of(given.arithmetic, given.checkpoint()),
              run_all(decode, prefill.address()));
  const serve::EngineStats stats = decode.engine().stats();
  EXPECT_EQ(stats.loads_failed, 0u);
  EXPECT_GT(stats.loaded_tokens, 1000u);
  EXPECT_GT(stats.cached_tokens, 0u);
  EXPECT_GT(stats.preemptions, 0u) << "the cache is too large for this test";
  // All ranks are counted.
  const uint64_t bytes = decode.connector().stats().bytes_loaded;
  EXPECT_GT(bytes, 1000u * 512) << "512 bytes a token, of all heads and layers";
  expect_clean(decode, kTight.blocks);
  prefill.stop();
  EXPECT_GT(prefill.engine().stats().jobs_finished, 0u);
  EXPECT_EQ(prefill.connector().stats().bytes_sent, bytes);
  expect_clean(prefill, kTight.blocks);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DegreePairs,
                         testing::Values(Case{"TwoToOne", 2, 1, Arithmetic::kFp32, "shm"},
                                         Case{"OneToTwo", 1, 2, Arithmetic::kFp32, "shm"},
                                         Case{"TwoToTwo", 2, 2, Arithmetic::kFp32, "shm"},
                                         Case{"TwoToOneOverTcp", 2, 1, Arithmetic::kFp32, "tcp"},
                                         Case{"OneToTwoOverTcp", 1, 2, Arithmetic::kFp32, "tcp"},
                                         Case{"TwoToTwoInBf16", 2, 2, Arithmetic::kBf16, "shm"},
                                         Case{"OneToTwoInBf16", 1, 2, Arithmetic::kBf16, "shm"},
                                         Case{"FourToTwo", 4, 2, Arithmetic::kFp32, "shm"},
                                         Case{"TwoToFour", 2, 4, Arithmetic::kFp32, "shm"},
                                         Case{"OneToTwoWithExperts", 1, 2, Arithmetic::kFp32, "shm",
                                              ranks_expert_checkpoint},
                                         Case{"TwoToOneWithExperts", 2, 1, Arithmetic::kFp32, "shm",
                                              ranks_expert_checkpoint}),
                         [](const auto& test) { return test.param.name; });

// Below the caches of both, tiers: what they have is not asked for, and not computed for others.
TEST(Degrees, TiersBesideHandOffsChangeNothing) {
  for (const auto& [prefill_ranks, decode_ranks] : {std::pair{2, 1}, {1, 2}, {2, 2}}) {
    const serve::KvTierOptions tiers{.host_bytes = 64 << 20, .load = serve::LoadWhen::kAlways};
    Server prefill(
        {.role = EngineRole::kPrefill, .ranks = prefill_ranks, .limits = kTight, .tiers = tiers});
    Server decode(
        {.role = EngineRole::kDecode, .ranks = decode_ranks, .limits = kTight, .tiers = tiers});
    prefill.start();
    for (int round = 0; round < 2; ++round) {
      expect_same(answers().of(), run_all(decode, prefill.address()));
    }
    const serve::EngineStats stats = decode.engine().stats();
    EXPECT_EQ(stats.loads_failed, 0u);
    EXPECT_GT(stats.loaded_tokens, 500u);
    EXPECT_GT(stats.tier_tokens, 500u);
    expect_clean(decode, kTight.blocks);
    prefill.stop();
    EXPECT_GT(prefill.engine().stats().tiers.loaded, 0u);
    expect_clean(prefill, kTight.blocks);
  }
}

// --- bad days ------------------------------------------------------------------------------------

// A connector that hands every call on, and fails some of the loads.
class Faulty : public KvConnector {
 public:
  // Of all loads every `refused`th does not start, and every `broken`th breaks on its way.
  Faulty(std::unique_ptr<KvConnector> inner, int refused, int broken)
      : inner_(std::move(inner)), refused_(refused), broken_(broken) {}

  absl::StatusOr<void*> allocate_cache(const kvtransfer::KvLayout& layout) override {
    return inner_->allocate_cache(layout);
  }
  std::string address() const override { return inner_->address(); }
  kvtransfer::KvConnectorStats stats() const override { return inner_->stats(); }
  void progress() override { inner_->progress(); }
  void wait(Time timeout, int fd) override { inner_->wait(timeout, fd); }
  absl::Status start_load(kvtransfer::KvLoad load) override {
    ++loads_;
    if (refused_ != 0 && loads_ % refused_ == 0) return absl::UnavailableError("not today");
    if (broken_ != 0 && loads_ % broken_ == 0) broken_loads_.insert(load.id);
    return inner_->start_load(std::move(load));
  }
  uint32_t layers_loaded(KvRequestId id) override {
    return broken_loads_.contains(id) ? 0 : inner_->layers_loaded(id);
  }
  absl::Status load_status(KvRequestId id) override {
    return broken_loads_.contains(id) ? absl::DataLossError("its cable was pulled")
                                      : inner_->load_status(id);
  }
  absl::Status wait_for_layer(KvRequestId id, uint32_t layer) override {
    return inner_->wait_for_layer(id, layer);
  }
  bool end_load(KvRequestId id) override { return inner_->end_load(id); }
  absl::Status renew_job(uint64_t job, Time lease) override {
    return inner_->renew_job(job, lease);
  }
  std::optional<kvtransfer::KvJob> next_job() override { return inner_->next_job(); }
  absl::StatusOr<uint64_t> bind(const kvtransfer::KvBinding& binding) override {
    return inner_->bind(binding);
  }
  bool is_wanted(uint64_t job) override { return inner_->is_wanted(job); }
  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks) override {
    return inner_->save_layer(job, layer, first_block, blocks);
  }
  void finish_job(uint64_t job, const absl::Status& outcome) override {
    inner_->finish_job(job, outcome);
  }
  bool is_saved(uint64_t job) override { return inner_->is_saved(job); }

 private:
  const std::unique_ptr<KvConnector> inner_;
  const int refused_;
  const int broken_;
  int loads_ = 0;
  std::set<KvRequestId> broken_loads_;
};

// Loads that will not come, for they did not start or were given up first, are not waited for long;
// but longer than the ranks of a load that does come are apart.
const Time kNotLong = patient(std::chrono::milliseconds(50));

// Loads fail at one rank of decode, and are there at the other.
void expect_recomputed(int prefill_ranks, int faulty_rank, int refused, int broken) {
  Server prefill({.role = EngineRole::kPrefill,
                  .ranks = prefill_ranks,
                  .limits = kTight,
                  .loads_apart = kNotLong});
  Server decode({.role = EngineRole::kDecode,
                 .ranks = 2,
                 .limits = kTight,
                 .wrap = [=](int rank, std::unique_ptr<KvConnector> inner) {
                   if (rank != faulty_rank) return inner;
                   return std::unique_ptr<KvConnector>(
                       new Faulty(std::move(inner), refused, broken));
                 }});
  prefill.start();
  const std::map<uint64_t, Outcome> outcomes = run_all(decode, prefill.address());
  expect_same(answers().of(), outcomes);
  EXPECT_GT(decode.engine().stats().loads_failed, 2u);
  if (refused == 0) {
    EXPECT_GT(decode.engine().stats().loaded_tokens, 200u) << "the others are used";
  }
  for (const auto& [id, outcome] : outcomes) {
    const std::string why(outcome.metrics.load_error.message());
    if (why.empty() || faulty_rank == 0) continue;
    EXPECT_THAT(why, HasSubstr("rank 1: "));
  }
  expect_clean(decode, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

// Promise(kv): A failed load at any rank is recomputed; no block is lost or reused too early | a
//   load is complete when it is at every rank
TEST(Degrees, ALoadThatBreaksAtAnyRankIsComputedAgain) {
  expect_recomputed(1, 1, 0, 3);
  expect_recomputed(2, 1, 0, 3);
  expect_recomputed(2, 0, 0, 3);
}

TEST(Degrees, ALoadThatDoesNotStartAtAnyRankIsComputedAgain) {
  expect_recomputed(1, 1, 3, 0);
  expect_recomputed(2, 1, 3, 0);
  expect_recomputed(2, 0, 3, 0);
}

// Requests that clients give up, at any moment, leave nothing behind at any rank.
TEST(Degrees, AbortedRequestsLeaveNothingBehind) {
  Server prefill(
      {.role = EngineRole::kPrefill, .ranks = 2, .limits = kTight, .loads_apart = kNotLong});
  Server decode({.role = EngineRole::kDecode, .ranks = 2, .limits = kTight});
  prefill.start();
  std::map<uint64_t, Outcome> outcomes;
  std::mt19937_64 random(7);
  for (size_t i = 0; i < kRequests; ++i) {
    Request request = requests()[i];
    request.prefill_address = prefill.address();
    ASSERT_TRUE(submit(decode.engine(), request, &outcomes[i]).ok());
    for (uint64_t steps = random() % 6; steps > 0; --steps) decode.step();
    if (random() % 2 == 0) decode.engine().abort(random() % (i + 1));
  }
  decode.finish();
  size_t aborted = 0;
  for (const auto& [id, outcome] : outcomes) {
    if (outcome.reason == serve::FinishReason::kAbort) {
      ++aborted;
    } else {
      EXPECT_EQ(outcome.tokens, answers().of().at(id).tokens) << id;
    }
  }
  EXPECT_GT(aborted, 3u);
  expect_clean(decode, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

// A rank of prefill goes, in the middle: its server is of no use any more, and decode computes.
TEST(Degrees, APrefillRankThatLeavesIsSurvived) {
  Server prefill(
      {.role = EngineRole::kPrefill,
       .ranks = 2,
       .limits = kTight,
       .body = [](Group& group, const Model& model, KvConnector& connector) {
         absl::StatusOr<KvMemory> memory = KvMemory::make(model, kTight.blocks, &connector);
         absl::Status status = memory.status();
         if (status.ok()) {
           status =
               group.agree(settings_of(model, kTight, "prefill"), connector.address()).status();
         }
         // Takes requests like any other, and leaves when the first step comes.
         const auto idle = [&] {
           connector.wait(std::chrono::milliseconds(1), -1);
           return true;
         };
         for (bool stepped = false; status.ok() && !stepped;) {
           const auto message = group.receive(idle);
           status = message.status();
           if (!status.ok()) break;
           const Command command = *base::read_fields<Command>(*message, "a command");
           stepped = command.kind == CommandKind::kStep;
           if (stepped) continue;
           status = group.exchange(std::string(Report::kBytes, '\0')).status();
         }
         return status;
       }});
  Server decode({.role = EngineRole::kDecode, .ranks = 1, .limits = kTight});
  prefill.start();
  const std::map<uint64_t, Outcome> outcomes = run_all(decode, prefill.address());
  expect_same(answers().of(), outcomes);
  EXPECT_GT(decode.engine().stats().loads_failed, 0u);
  EXPECT_EQ(decode.engine().stats().loaded_tokens, 0u);
  expect_clean(decode, kTight.blocks);
  prefill.stop();
  EXPECT_FALSE(prefill.leader()->status().ok());
  EXPECT_EQ(prefill.engine().stats().free_blocks, kTight.blocks);
}

// --- what must not be loaded ---------------------------------------------------------------------

// A prompt whose KV cannot be had from there: it is computed, and the answer says why.
void expect_not_loaded(Server& decode, const std::string& address, const std::string& what,
                       const Checkpoint& checkpoint = ranks_checkpoint()) {
  static int32_t number = 0;
  Request request = requests()[0];
  request.tokens.assign(40, ++number);  // that no cache knows
  request.sampling.temperature = 0;
  const Model model = *Model::create(checkpoint);
  const std::vector<int32_t> want = serve::oracle_tokens(request, model);
  request.prefill_address = address;
  Outcome outcome;
  ASSERT_TRUE(submit(decode.engine(), request, &outcome).ok());
  decode.finish();
  EXPECT_EQ(outcome.tokens, want);
  EXPECT_THAT(std::string(outcome.metrics.load_error.message()), HasSubstr(what));
  EXPECT_EQ(decode.engine().stats().loaded_tokens, 0u);
}

TEST(Degrees, WrongAddressesAreRefusedByName) {
  // What is wrong with a load is said while its other parts are waited for.
  Server prefill({.role = EngineRole::kPrefill,
                  .ranks = 2,
                  .limits = kTight,
                  .loads_apart = patient(std::chrono::milliseconds(200))});
  Server one({.role = EngineRole::kDecode, .limits = kTight});
  Server two({.role = EngineRole::kDecode, .ranks = 2, .limits = kTight});
  prefill.start();
  const std::vector<std::string> ranks = *split_kv_address(prefill.address());
  ASSERT_EQ(ranks.size(), 2u);
  expect_not_loaded(one, ranks[0], "holds KV heads [0, 2) but the decode worker needs [0, 4)");
  expect_not_loaded(one, join_kv_addresses({ranks[1], ranks[0]}),
                    " of 2 it should send others of ");
  expect_not_loaded(one, "baton-ranks1:" + ranks[0] + ",", "/v1/baton/address");
  expect_not_loaded(one, "baton-ranks2:" + ranks[0], "the same release");
  expect_not_loaded(two, ranks[0], "rank 1: ");
  expect_not_loaded(two, join_kv_addresses({ranks[0], ranks[1], ranks[1]}),
                    "3 tensor-parallel ranks and this one 2: one of the numbers must divide");
  expect_clean(one, kTight.blocks);
  expect_clean(two, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

TEST(Degrees, TheKvOfAnotherCheckpointIsRefused) {
  static const Checkpoint& other = *new Checkpoint(make_test_checkpoint(ranks_config(), 4));
  Server prefill({.role = EngineRole::kPrefill, .ranks = 2, .limits = kTight});
  Server decode({.role = EngineRole::kDecode, .ranks = 2, .limits = kTight, .checkpoint = &other});
  prefill.start();
  expect_not_loaded(decode, prefill.address(), "same checkpoint", other);
  expect_clean(decode, kTight.blocks);
  expect_clean(prefill, kTight.blocks);
}

// Whoever knows one rank only, as an older release may: the rank says what to do.
TEST(Degrees, ALoadOfOneRankAloneIsRefused) {
  Server prefill({.role = EngineRole::kPrefill, .ranks = 2, .limits = kTight});
  prefill.start();
  const std::vector<std::string> ranks = *split_kv_address(prefill.address());
  for (int rank = 0; rank < 2; ++rank) {
    const auto connector = rank_connector({.role = EngineRole::kDecode}, rank);
    const Model half = *Model::create(ranks_checkpoint(), Arithmetic::kFp32, {rank, 2});
    KvMemory memory = *KvMemory::make(half, kTight.blocks, connector.get());
    kvtransfer::KvLoad load;
    load.id = 1;
    load.prefill = ranks[static_cast<size_t>(rank)];
    load.tokens.assign(32, 5);
    load.blocks = {0, 1};
    ASSERT_TRUE(connector->start_load(std::move(load)).ok());
    until([&] { return !connector->load_status(1).ok() || connector->layers_loaded(1) > 0; },
          [&] { connector->wait(std::chrono::milliseconds(1), -1); });
    EXPECT_THAT(std::string(connector->load_status(1).message()), HasSubstr("/v1/baton/address"));
    until([&] { return connector->end_load(1); },
          [&] { connector->wait(std::chrono::milliseconds(1), -1); });
  }
  expect_clean(prefill, kTight.blocks);
}

TEST(Degrees, ARankWithoutAConnectorIsRefused) {
  const RendezvousPlace place(2);
  Followers followers(place, Arithmetic::kFp32, {.limits = kTight, .role = "decode"});
  auto group = *Group::meet(place.options(0));
  const Model model = *Model::create(ranks_checkpoint(), Arithmetic::kFp32, group->shard());
  auto leader = *Leader::create(*group, model, kTight, "decode");
  const auto refused =
      RanksConnector::create(*leader, rank_connector({.role = EngineRole::kDecode}, 0));
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("rank 1 has no KV connector"));
}

// --- addresses -----------------------------------------------------------------------------------

TEST(KvAddress, OneRank) {
  EXPECT_EQ(join_kv_addresses({"baton1:abc"}), "baton1:abc");
  EXPECT_EQ(*split_kv_address("baton1:abc"), std::vector<std::string>{"baton1:abc"});
  EXPECT_EQ(*split_kv_address("10.0.0.1:80"), std::vector<std::string>{"10.0.0.1:80"});
}

TEST(KvAddress, SeveralRanksKeepTheirOrder) {
  const std::vector<std::string> ranks = {"baton1:b", "baton1:a", "baton1:c"};
  EXPECT_EQ(*split_kv_address(join_kv_addresses(ranks)), ranks);
}

TEST(KvAddress, NonsenseIsRefused) {
  for (const std::string& text :
       {std::string("baton-ranks1:"), std::string("baton-ranks1:a,,b"), std::string("baton-ranks"),
        std::string("baton-ranks2:a,b"), "baton-ranks1:a" + std::string(256, ',') + "b"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(split_kv_address(text).status())) << text;
  }
}

}  // namespace
}  // namespace baton::engine::shard::degrees
