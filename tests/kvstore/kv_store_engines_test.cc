// Engines over `baton kv_store` as a process of its own, which is stopped, killed, started again,
// full, or another tenant's: every answer has the tokens that it has without a store.
#include "engine/serve/engine.h"
#include "kvtransfer/store/store_client.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/child.h"

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
  StoreProcess(const TemporaryFolder& folder, int mib)
      : key_(folder.path("key")), mib_(std::to_string(mib)) {
    std::ofstream(key_) << "a key for engines over a store\n";
    std::filesystem::permissions(key_, std::filesystem::perms(0600));
    start();
  }
  ~StoreProcess() { end(SIGKILL); }

  // Somebody else may have the port for a moment.
  void start() {
    for (const Time give_up = Clock::steady().now() + kLong; pid_ < 0;) {
      ASSERT_LT(Clock::steady().now(), give_up) << "baton kv_store does not start";
      start_once();
    }
  }
  void end(int signal) {
    if (pid_ < 0) return;
    go_on();
    kill(pid_, signal);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  void stop() {
    if (std::exchange(stopped_, true)) return;
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);  // it has
  }
  void go_on() {
    stopped_ = false;
    kill(pid_, SIGCONT);
  }
  std::string address() const { return "127.0.0.1:" + port_; }
  const std::string& key() const { return key_; }

 private:
  void start_once() {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const pid_t child = base::fork_child();
    if (child == 0) {
      dup2(ends[1], STDOUT_FILENO);
      execl(BATON_COMMAND, BATON_COMMAND, "kv_store", "--memory-mib", mib_.c_str(), "--port",
            port_.c_str(), "--key-file", key_.c_str(), "--provider", "tcp", nullptr);
      _exit(7);
    }
    close(ends[1]);
    std::FILE* out = fdopen(ends[0], "r");
    unsigned port = 0;
    const bool ready = fscanf(out, "ready: kv_store on 127.0.0.1:%u", &port) == 1;
    std::fclose(out);
    if (ready) {
      pid_ = child;
      port_ = std::to_string(port);
    } else {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }

  const std::string key_;
  const std::string mib_;
  std::string port_ = "0";
  pid_t pid_ = -1;
  bool stopped_ = false;
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

std::unique_ptr<Engine> make(EngineOptions options) {
  return *Engine::create(test_model(), test_tokenizer(), std::move(options));
}

void wait_until_up(Engine& engine) {
  until([&] { return engine.tiers()->explain().find("(up)") != std::string::npos; },
        [&] { engine.tiers()->wait(std::chrono::milliseconds(20), -1); },
        [&] { return engine.tiers()->explain(); });
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
  const TemporaryFolder folder;
  StoreProcess store(folder, 32);
  {
    auto first = make(with(client(store)));
    wait_until_up(*first);
    run_and_compare(*first, 6, true);
  }
  for (size_t in_flight : {6, 1}) {
    auto second = make(with(client(store), in_flight == 1 ? 64 << 10 : 0));
    wait_until_up(*second);
    run_and_compare(*second, in_flight, false);
    EXPECT_GT(second->stats().tiers.from_peer, 50u);
    EXPECT_GT(second->stats().tier_tokens, 500u);
    EXPECT_EQ(second->stats().tiers.corrupt, 0u);
  }
}

TEST(KvStoreEngines, PreemptedOnesGoOn) {
  const TemporaryFolder folder;
  StoreProcess store(folder, 32);
  EngineOptions options = with(client(store));
  options.blocks = 26;
  options.token_budget = 16;
  auto engine = make(options);
  wait_until_up(*engine);
  for (bool save_all : {true, false}) run_and_compare(*engine, 30, save_all);
  EXPECT_GT(engine->stats().preemptions, 0u);
  EXPECT_GT(engine->stats().tiers.from_peer, 0u);
}

TEST(KvStoreEngines, AFullStoreForgetsTheOldest) {
  const TemporaryFolder folder;
  StoreProcess store(folder, 1);
  auto engine = make(with(client(store)));
  wait_until_up(*engine);
  for (int round = 0; round < 2; ++round) run_and_compare(*engine, 6, true);
  EXPECT_EQ(engine->stats().tiers.corrupt, 0u);
}

TEST(KvStoreEngines, AnotherTenantFindsNothing) {
  const TemporaryFolder folder;
  StoreProcess store(folder, 32);
  EngineOptions options = with(client(store));
  options.blocks = 400;
  options.tiers.salt = "one";
  auto first = make(options);
  wait_until_up(*first);
  run_and_compare(*first, 6, true);
  options.tiers.salt = "two";
  auto second = make(options);
  wait_until_up(*second);
  run_and_compare(*second, 6, true);
  EXPECT_EQ(second->stats().tier_tokens, 0u);
}

// The engine starts before its store, and outlives two of them.
TEST(KvStoreEngines, AStoreThatIsKilledAndStartedAgain) {
  const TemporaryFolder folder;
  StoreProcess store(folder, 32);
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
  const TemporaryFolder folder;
  StoreProcess store(folder, 32);
  kvtransfer::store::StoreClientOptions options = client(store);
  options.lookup_timeout = std::chrono::milliseconds(100);
  options.load_timeout = std::chrono::milliseconds(500);
  auto engine = make(with(options));
  wait_until_up(*engine);
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
  const TemporaryFolder folder;
  StoreProcess store(folder, 2);
  kvtransfer::store::StoreClientOptions options = client(store);
  options.lookup_timeout = std::chrono::milliseconds(100);
  options.load_timeout = std::chrono::milliseconds(500);
  auto engine = make(with(options, 64 << 10));
  std::mt19937_64 random(11);
  bool alive = true;
  for (int round = 0; round < 4; ++round) {
    run_and_compare(*engine, 1 + random() % 8, false, [&](size_t) {
      switch (random() % 24) {
        case 0:
          store.end(SIGKILL);
          alive = false;
          break;
        case 1:
        case 2:
          if (!alive) store.start();
          alive = true;
          break;
        case 3:
          if (alive) store.stop();
          break;
        case 4:
        case 5:
          if (alive) store.go_on();
          break;
        default:
          break;
      }
    });
  }
  EXPECT_EQ(engine->stats().tiers.corrupt, 0u);
}

}  // namespace
}  // namespace baton::engine::serve
