// Engines and their endpoints: shared, closed when the peer has gone, and ended beside a peer that
// has stopped listening.
#include "transport/ucx/engine.h"

#include "tests/test.h"
#include "tests/ucx/raw_peer.h"
#include "transport/clock.h"

namespace baton::ucx {
namespace {

size_t open_files() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

class UcxEngine : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = Engine::check(kLoopback); !status.ok()) GTEST_SKIP() << status;
  }
  std::unique_ptr<Engine> make() {
    auto engine = Engine::create(kLoopback, [this](std::string_view message) {
      ++messages_;
      handshakes_ += message.size() == kLastMessage;
      bytes_ += message.size();
    });
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  static void send(Engine& engine, Endpoint& to, size_t bytes) {
    Packet* packet = engine.acquire(bytes);
    std::memset(packet->data.get(), 7, bytes);
    engine.send(to, packet, bytes);
  }
  template <typename Ready>
  static void until(std::initializer_list<Engine*> engines, Ready ready,
                    CallSite from = CallSite::here()) {
    const auto turn = [&] {
      for (Engine* engine : engines) engine->progress();
    };
    baton::until(ready, turn, NoState(), from);
  }

  static constexpr size_t kLastMessage = 1000;
  size_t messages_ = 0;
  size_t handshakes_ = 0;
  size_t bytes_ = 0;
};

// UCX ends the process, or its listener, when it finds none.
TEST_F(UcxEngine, DescriptorsAreAskedForBeforeItStarts) {
  const auto other = make();
  const auto with_free = [](size_t free, const std::function<void()>& what) {
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit limit = before;
    limit.rlim_cur = open_files() - 1 + free;  // the listing's own is closed
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    what();
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  };
  for (const size_t free : {0, 1, 2, 3, 4, 5, 12}) {
    SCOPED_TRACE(free);
    absl::Status created, checked, connected;
    with_free(free, [&] {
      created = Engine::create(kLoopback, nullptr).status();
      checked = Engine::check(kLoopback);
      connected = other->connect("nobody's").status();
    });
    for (const absl::Status& status : {created, checked, connected}) {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("ulimit -n"));
    }
  }
  EXPECT_NE(make(), nullptr) << "there are descriptors again";
}

TEST_F(UcxEngine, CallersShareOneEndpointPerPeer) {
  auto a = make(), b = make();
  auto first = a->connect(b->address());
  auto second = a->connect(b->address());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(*first, *second);
  send(*a, **first, 60'000);
  until({a.get(), b.get()}, [&] { return messages_ == 1; });
  // Nobody uses it, its peer is there: the next finds it again.
  a->release(*first);
  a->release(*second);
  for (int i = 0; i < 100; ++i) a->progress();
  auto third = a->connect(b->address()).value();
  EXPECT_EQ(third, *first);
  send(*a, *third, 100);
  until({a.get(), b.get()}, [&] { return messages_ == 2; });
  EXPECT_EQ(bytes_, 60'100u);
  Engine::end(std::move(a));
  Engine::end(std::move(b));
}

TEST_F(UcxEngine, AnEndpointOnWhichThePeerWasSilentIsNotGivenToTheNext) {
  auto a = make(), b = make();
  std::vector<Endpoint*> all;
  for (size_t i = 0; i < Engine::kMostSilent; ++i) {
    auto next = a->connect(b->address()).value();
    send(*a, *next, 100);
    until({a.get(), b.get()}, [&] { return messages_ == i + 1; });
    EXPECT_EQ(std::count(all.begin(), all.end(), next), 0);
    all.push_back(next);
    next->silent = true;
    a->release(next);
  }
  // They do not grow without end: the first that was silent is asked again, and is as good as any.
  auto again = a->connect(b->address()).value();
  EXPECT_EQ(again, all[0]);
  again->silent = false;
  EXPECT_EQ(*a->connect(b->address()), all[0]);
  Engine::end(std::move(a));
  Engine::end(std::move(b));
}

TEST_F(UcxEngine, APeerThatEndsIsNoticedAndForgotten) {
  auto a = make();
  size_t files = 0;
  for (int round = 0; round < 5; ++round) {
    auto b = make();
    auto to_b = a->connect(b->address());
    auto to_a = b->connect(a->address());
    ASSERT_TRUE(to_b.ok() && to_a.ok());
    const size_t before = messages_;
    send(*a, **to_b, 1000);
    send(*b, **to_a, 1000);
    until({a.get(), b.get()}, [&] { return messages_ == before + 2; });
    // A farewell is over when the peer has heard everything: both have to run.
    std::thread farewell([&] { Engine::end(std::move(b)); });
    until({a.get()}, [&] { return !(*to_b)->failure.ok(); });
    farewell.join();
    a->release(*to_b);
    for (int i = 0; i < 1000; ++i) a->progress();
    if (round == 0) files = open_files();
    Engine::end(make());  // also of what may have been set aside
    until({a.get()}, [&] { return open_files() <= files; });
  }
  Engine::end(std::move(a));
}

// UCX would wait in ucp_worker_destroy(), or leave half a message behind.
TEST_F(UcxEngine, OneEndsBesideAPeerThatHasStoppedListening) {
  Engine::end(make());  // whatever is opened once
  const size_t files = open_files();
  auto b = make();
  for (const bool noticed : {false, true}) {
    auto a = make();
    auto to_b = a->connect(b->address());
    auto to_a = b->connect(a->address());
    ASSERT_TRUE(to_b.ok() && to_a.ok());
    // What it has not heard yet of the one before comes first.
    send(*a, **to_b, kLastMessage);
    until({a.get(), b.get()}, [&] { return handshakes_ == (noticed ? 2u : 1u); });
    // From here on nothing of b runs, and the sockets between them fill up.
    for (int i = 0; i < 2000; ++i) {
      if ((*to_b)->under_way < 16) send(*a, **to_b, 60'000);
      a->progress();
    }
    EXPECT_GT((*to_b)->under_way, 0u);
    (*to_b)->silent = noticed;
    Engine::end(std::move(a));
    EXPECT_GT(open_files(), files);
  }
  // The peer goes; what was set aside for it goes when the next engine is made.
  Engine::end(std::move(b));
  baton::until([&] { return open_files() <= files; }, [&] { Engine::end(make()); });
  EXPECT_EQ(open_files(), files);
}

TEST_F(UcxEngine, AnAddressWithoutAProcessFails) {
  auto a = make();
  std::string address;
  {
    auto b = make();
    address = b->address();
    Engine::end(std::move(b));
  }
  auto endpoint = a->connect(address);
  if (endpoint.ok()) {
    send(*a, **endpoint, 100);
    until({a.get()}, [&] { return !(*endpoint)->failure.ok(); });
    until({a.get()}, [&] { return (*endpoint)->under_way == 0; });
    a->release(*endpoint);
  }
  Engine::end(std::move(a));
}

}  // namespace
}  // namespace baton::ucx
