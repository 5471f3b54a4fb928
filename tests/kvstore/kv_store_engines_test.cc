// Engines over `baton kv_store` as a process of its own, which is stopped, killed, started again,
// full, or another tenant's: every answer has the tokens that it has without a store.
#include "engine/serve/engine.h"
#include "kvtransfer/store/store_client.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/peer_process.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

constexpr size_t kRequests = 100;
const Time kLong = until_gives_up();  // for what must come

const std::vector<Request>& requests() {
  static const auto* list = new std::vector<Request>(random_requests(37, kRequests));
  return *list;
}

const std::map<uint64_t, Outcome>& expected() {
  static const auto* outcomes = new std::map<uint64_t, Outcome>(run_one_at_a_time(requests()));
  return *outcomes;
}

// `baton kv_store`. Started again, it has the port that it had.
class StoreProcess {
 public:
  explicit StoreProcess(int mib) : mib_(std::to_string(mib)) {
    std::ofstream(key_) << "a key for engines over a store\n";
    std::filesystem::permissions(key_, std::filesystem::perms(0600));
    start();
  }

  // Somebody else may have the port for a moment.
  void start() {
    for (const Time give_up = Clock::steady().now() + kLong; !is_alive();) {
      ASSERT_LT(Clock::steady().now(), give_up) << "baton kv_store does not start";
      process_.emplace(BATON_COMMAND,
                       std::vector<std::string>{"kv_store", "--memory-mib", mib_, "--port", port_,
                                                "--key-file", key_, "--provider", "tcp"});
      unsigned port = 0;
      if (sscanf(process_->line().c_str(), "ready: kv_store on 127.0.0.1:%u", &port) == 1) {
        port_ = std::to_string(port);
      } else {
        process_.reset();
      }
    }
  }
  bool is_alive() const { return process_.has_value(); }
  void end(int signal) {
    go_on();
    process_->kill_it(signal);
    process_.reset();
  }
  void stop() {
    go_on();  // one that stands already does not stop again
    process_->stop();
  }
  void go_on() { process_->go_on(); }
  std::string address() const { return "127.0.0.1:" + port_; }
  const std::string& key() const { return key_; }

 private:
  const TemporaryFolder folder_;
  const std::string key_ = folder_.path("key");
  const std::string mib_;
  std::string port_ = "0";
  std::optional<PeerProcess> process_;
};

// Patient: whatever is there is found, however busy the machine is.
kvtransfer::store::StoreClientOptions client(const StoreProcess& store) {
  return {.store = store.address(),
          .providers = {"tcp"},
          .key = *ClusterKey::from_file(store.key()),
          .lookup_timeout = kLong,
          .load_timeout = kLong};
}

EngineOptions with(kvtransfer::store::StoreClientOptions options, size_t host_bytes = 0) {
  KvTierOptions tiers{.host_bytes = host_bytes};
  tiers.timeout = options.load_timeout;
  tiers.peer = kvtransfer::store::store_client(std::move(options));
  return {.blocks = 40, .token_budget = 40, .max_sequences = 6, .tiers = std::move(tiers)};
}

void wait_until_up(Engine& engine) {
  until([&] { return engine.tiers()->explain().find("(up)") != std::string::npos; },
        [&] { engine.tiers()->wait(std::chrono::milliseconds(20), -1); },
        [&] { return engine.tiers()->explain(); });
}

std::unique_ptr<Engine> make(EngineOptions options) {
  return *Engine::create(test_model(), test_tokenizer(), std::move(options));
}

// One that has found its store.
std::unique_ptr<Engine> make_up(EngineOptions options) {
  auto engine = make(std::move(options));
  wait_until_up(*engine);
  return engine;
}

// Each request ends as it should.
void run_and_compare(
    Engine& engine, size_t in_flight, bool save_all,
    const std::function<void(size_t number)>& before = [](size_t) {}) {
  const auto flush = [&] {
    if (save_all) engine.tiers()->flush();
  };
  expect_same(expected(), serve::run_all(engine, requests(), in_flight, flush, before));
  EXPECT_TRUE(engine.check_integrity().ok()) << engine.check_integrity();
  EXPECT_EQ(engine.stats().free_blocks, engine.stats().blocks);
}

// In a batch, and alone, where layers are computed while others arrive.
TEST(KvStoreEngines, OneFindsWhatAnotherComputed) {
  StoreProcess store(32);
  {
    auto first = make_up(with(client(store)));
    run_and_compare(*first, 6, true);
  }
  for (size_t in_flight : {6, 1}) {
    auto second = make_up(with(client(store), in_flight == 1 ? 64 << 10 : 0));
    run_and_compare(*second, in_flight, false);
    EXPECT_GT(second->stats().tiers.from_peer, 50u);
    EXPECT_GT(second->stats().tier_tokens, 500u);
    EXPECT_EQ(second->stats().tiers.corrupt, 0u);
  }
}

TEST(KvStoreEngines, PreemptedOnesGoOn) {
  StoreProcess store(32);
  EngineOptions options = with(client(store));
  options.blocks = 26;
  options.token_budget = 16;
  auto engine = make_up(options);
  for (bool save_all : {true, false}) run_and_compare(*engine, 30, save_all);
  EXPECT_GT(engine->stats().preemptions, 0u);
  EXPECT_GT(engine->stats().tiers.from_peer, 0u);
}

TEST(KvStoreEngines, AFullStoreForgetsTheOldest) {
  StoreProcess store(1);
  auto engine = make_up(with(client(store)));
  for (int round = 0; round < 2; ++round) run_and_compare(*engine, 6, true);
  EXPECT_EQ(engine->stats().tiers.corrupt, 0u);
}

TEST(KvStoreEngines, AnotherTenantFindsNothing) {
  StoreProcess store(32);
  EngineOptions options = with(client(store));
  options.blocks = 400;
  options.tiers.salt = "one";
  auto first = make_up(options);
  run_and_compare(*first, 6, true);
  options.tiers.salt = "two";
  auto second = make_up(options);
  run_and_compare(*second, 6, true);
  EXPECT_EQ(second->stats().tier_tokens, 0u);
}

// The engine starts before its store, and outlives two of them.
TEST(KvStoreEngines, AStoreThatIsKilledAndStartedAgain) {
  StoreProcess store(32);
  store.end(SIGKILL);
  auto engine = make(with(client(store)));
  run_and_compare(*engine, 6, false);
  for (int life = 0; life < 2; ++life) {
    store.start();
    wait_until_up(*engine);
    run_and_compare(*engine, 6, true);
    const uint64_t before = engine->stats().tiers.from_peer;
    run_and_compare(*engine, 6, false, [&](size_t number) {
      if (number == kRequests / 2) store.end(life == 0 ? SIGKILL : SIGTERM);
    });
    EXPECT_GT(engine->stats().tiers.from_peer, before);
  }
}

// Stopped with lookups, loads and offers under way. How long is waited is the client's choice.
TEST(KvStoreEngines, AStoreThatIsStopped) {
  StoreProcess store(32);
  kvtransfer::store::StoreClientOptions options = client(store);
  options.lookup_timeout = std::chrono::milliseconds(100);
  options.load_timeout = std::chrono::milliseconds(500);
  auto engine = make_up(with(options));
  run_and_compare(*engine, 6, true);
  for (size_t in_flight : {6, 1}) {
    run_and_compare(*engine, in_flight, false, [&](size_t number) {
      if (number == kRequests / 3) store.stop();
    });
    EXPECT_EQ(engine->tiers()->explain().find("(up)"), std::string::npos);
    store.go_on();
    wait_until_up(*engine);
  }
  EXPECT_GT(engine->stats().tiers.silences, 0u);
}

// Whatever happens to it, in whatever order.
TEST(KvStoreEngines, AStoreWithABadDay) {
  StoreProcess store(2);
  kvtransfer::store::StoreClientOptions options = client(store);
  options.lookup_timeout = std::chrono::milliseconds(100);
  options.load_timeout = std::chrono::milliseconds(500);
  auto engine = make(with(options, 64 << 10));
  std::mt19937_64 random(11);
  for (int round = 0; round < 4; ++round) {
    run_and_compare(*engine, 1 + random() % 8, false, [&](size_t) {
      const uint64_t what = random() % 24;
      if (!store.is_alive()) {
        if (what == 1 || what == 2) store.start();
      } else if (what == 0) {
        store.end(SIGKILL);
      } else if (what == 3) {
        store.stop();
      } else if (what == 4 || what == 5) {
        store.go_on();
      }
    });
  }
  EXPECT_EQ(engine->stats().tiers.corrupt, 0u);
}

}  // namespace
}  // namespace baton::engine::serve
