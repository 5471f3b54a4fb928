// Ranks in processes of their own, that are killed, stopped and forked; and two plugins in one.
#include <spawn.h>
#include <sys/wait.h>

#include "plugins/nccl/plugin.h"
#include "tests/nccl_net/rig.h"
#include "tests/peer_process.h"
#include "tests/temporary_folder.h"

namespace baton::nccl {
namespace {

constexpr size_t kBytes = 1 << 20;

std::string hex_of(const HandleBuffer& handle) {
  std::string hex;
  for (const char byte : handle) hex += absl::StrFormat("%02x", static_cast<unsigned char>(byte));
  return hex;
}
HandleBuffer handle_of(const std::string& hex) {
  HandleBuffer handle{};
  for (size_t i = 0; i < handle.size(); ++i) {
    handle[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return handle;
}

void say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// The peer: connects to the handle that it is given and sends, or prints a handle of its own and
// receives; as much as it can, for ever.
int move_for_ever(const std::string& provider, const std::string& hex) {
  const bool sends = !hex.empty();
  NetRig rig;
  rig.start({.name = provider, .provider = provider});
  const AnyNet& net = rig.net();
  HandleBuffer handle = sends ? handle_of(hex) : HandleBuffer{};
  void *listener = nullptr, *comm = nullptr, *memory = nullptr;
  if (!sends) {
    if (net.listen(0, handle.data(), &listener) != Result::kSuccess) return 1;
    say(hex_of(handle));
  }
  rig.until([&] {
    const Result result =
        sends ? net.connect(0, handle.data(), &comm) : net.accept(listener, &comm);
    return result != Result::kSuccess || comm != nullptr;
  });
  if (comm == nullptr) return 1;
  if (sends) say("connected");
  Pages pages(kBytes);
  if (sends) std::fill(pages.data(), pages.data() + kBytes, std::byte{0x77});
  if (net.register_memory(comm, pages.data(), kBytes, &memory) != Result::kSuccess) return 1;
  std::deque<void*> requests;
  for (Result result = Result::kSuccess; result == Result::kSuccess;) {
    void* request = nullptr;
    int done = 0;
    result = sends ? net.send(comm, pages.data(), kBytes, 0, memory, &request)
                   : net.receive_one(comm, pages.data(), kBytes, 0, memory, &request);
    if (request != nullptr) requests.push_back(request);
    if (result != Result::kSuccess || requests.empty()) continue;
    result = net.test(requests.front(), &done, nullptr);
    if (done != 0) requests.pop_front();
  }
  pause();
  return 0;
}

// A comm with a peer in another process, from which this one receives or to which it sends.
class WithPeer : public testing::TestWithParam<std::string> {
 public:
  explicit WithPeer(bool receives) : receives_(receives) {}
  void SetUp() override {
    NetLog::forget();
    rig.start({.name = GetParam(), .provider = GetParam()});
    if (IsSkipped()) return;
    if (receives_) {
      Listener listener(rig);
      start_peer(hex_of(listener.handle));
      rig.until([&] {
        EXPECT_EQ(net().accept(listener.comm, &comm), Result::kSuccess);
        return comm != nullptr || HasFailure();
      });
      ASSERT_EQ(peer->line(), "connected");
    } else {
      start_peer("");
      HandleBuffer handle = handle_of(peer->line());
      rig.until([&] {
        EXPECT_EQ(net().connect(0, handle.data(), &comm), Result::kSuccess);
        return comm != nullptr || HasFailure();
      });
    }
    ASSERT_EQ(net().register_memory(comm, pages.data(), kBytes, &memory), Result::kSuccess);
  }
  void TearDown() override {
    if (comm != nullptr) close();
    rig.stop();
  }
  void close() {
    void* const closed = std::exchange(comm, nullptr);
    EXPECT_EQ(receives_ ? net().close_receive(closed) : net().close_send(closed), Result::kSuccess);
  }
  AnyNet& net() { return rig.net(); }
  Result post(void*& request) {
    return receives_ ? net().receive_one(comm, pages.data(), kBytes, 0, memory, &request)
                     : net().send(comm, pages.data(), kBytes, 0, memory, &request);
  }
  bool tested(void* request) {
    int done = 0;
    EXPECT_EQ(net().test(request, &done, nullptr), Result::kSuccess);
    return done != 0 || HasFailure();
  }
  std::vector<void*> post_all(size_t messages) {
    std::vector<void*> requests;
    rig.until([&] {
      void* request = nullptr;
      EXPECT_EQ(post(request), Result::kSuccess);
      if (request != nullptr) requests.push_back(request);
      return requests.size() == messages || HasFailure();
    });
    return requests;
  }
  // Moves so many messages.
  void take(int messages) {
    for (int i = 0; i < messages; ++i) {
      void* const request = post_all(1).at(0);
      rig.until([&] { return tested(request); });
    }
  }
  // What comes of a peer that was stopped and goes on.
  void expect_to_go_on(std::vector<void*> requests) {
    const auto test_all = [&] {
      std::erase_if(requests, [&](void* request) { return tested(request); });
      return requests.empty() || HasFailure();
    };
    for (int i = 0; i < 1'000; ++i) test_all();
    peer->go_on();
    rig.until(test_all);
  }

  NetRig rig;
  std::optional<PeerProcess> peer;
  Pages pages{kBytes};
  void* comm = nullptr;
  void* memory = nullptr;

 private:
  void start_peer(const std::string& hex) {
    peer.emplace("/proc/self/exe", absl::StrCat("--peer=", GetParam(), ",", hex).c_str());
  }
  const bool receives_;
};

class Processes : public WithPeer {
 public:
  Processes() : WithPeer(true) {}
};
INSTANTIATE_TEST_SUITE_P(Nets, Processes, testing::Values("shm", "tcp"),
                         [](const auto& of) { return of.param; });

TEST_P(Processes, BytesComeFromAnotherProcess) {
  take(50);
  EXPECT_TRUE(std::all_of(pages.data(), pages.data() + kBytes,
                          [](std::byte b) { return b == std::byte{0x77}; }));
}

// Promise(nccl): A rank that is killed is ncclRemoteError at the other, with one line of the log |
//   a peer is killed while receives are posted, over shm and tcp
TEST_P(Processes, APeerThatIsKilled) {
  take(5);
  peer->stop();
  void* request = post_all(1).at(0);
  // What was on its way may still come; then there is a receive that nothing comes for.
  peer->kill_it();
  Result result = Result::kSuccess;
  rig.until([&] {
    int done = 0;
    result = net().test(request, &done, nullptr);
    if (done != 0) (void)post(request = nullptr);
    return result != Result::kSuccess || request == nullptr;
  });
  EXPECT_TRUE(request == nullptr || result == Result::kRemoteError) << result;
  rig.until([&] { return post(request = nullptr) == Result::kRemoteError; });
  EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::SizeIs(1));
}

// A stopped rank is no dead one: nothing fails, and it goes on.
TEST_P(Processes, APeerThatIsStoppedAndGoesOn) {
  take(5);
  peer->stop();
  expect_to_go_on(post_all(8));
  take(20);
}

// Promise(nccl): A comm is closed in any state within 50 ms, whatever its peer does | the peer is
//   stopped with 32 receives posted; another comm is opened afterwards
TEST_P(Processes, AStoppedPeerHoldsUpNoClose) {
  take(3);
  peer->stop();
  void* request = nullptr;
  for (int i = 0; i < 32; ++i) EXPECT_EQ(post(request), Result::kSuccess);
  const auto begin = std::chrono::steady_clock::now();
  close();
  const auto took = std::chrono::steady_clock::now() - begin;
  // The promise is 50 ms of an idle machine; what must not happen is that it waits for the peer.
  EXPECT_LT(took, std::chrono::seconds(2));
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
}

// A receiver that is killed or stopped between isend and test.
class Receivers : public WithPeer {
 public:
  Receivers() : WithPeer(false) {}
};
INSTANTIATE_TEST_SUITE_P(Nets, Receivers, testing::Values("shm", "tcp"),
                         [](const auto& of) { return of.param; });

TEST_P(Receivers, OneThatIsKilledBetweenSendAndTest) {
  const std::vector<void*> requests = post_all(8);
  peer->kill_it();
  for (void* const request : requests) {
    rig.until([&] {
      int done = 0;
      const Result result = net().test(request, &done, nullptr);
      EXPECT_TRUE(result == Result::kSuccess || result == Result::kRemoteError) << result;
      return done != 0 || result != Result::kSuccess;
    });
  }
  void* request = nullptr;
  rig.until([&] { return post(request) == Result::kRemoteError; });
  EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::SizeIs(1));
}

TEST_P(Receivers, OneThatIsStoppedBetweenSendAndTest) {
  const std::vector<void*> requests = post_all(8);
  peer->stop();
  expect_to_go_on(requests);
  peer->stop();
  void* request = nullptr;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(post(request), Result::kSuccess);
  close();
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
}

// Promise(nccl): A process that is forked after NCCL was initialised cannot use the plugin: each
//   call is an error that says so, and its parent goes on | every function is called in a child
TEST_P(Receivers, AForkedChildHasNothingOfItsParents) {
  Lane lane(rig, 1'000);
  void* const receive = lane.receive({{0, 1'000, 0}});
  Listener listener(rig);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    void* out = nullptr;
    int done = 0;
    const Result results[] = {
        net().listen(0, listener.handle.data(), &out),
        net().connect(0, listener.handle.data(), &out),
        net().accept(listener.comm, &out),
        net().register_memory(lane.ends.send, lane.in.data(), 8, &out),
        net().deregister(lane.ends.send, lane.out_memory),
        net().send(lane.ends.send, lane.out.data(), 8, 0, lane.out_memory, &out),
        net().receive_one(lane.ends.receive, lane.in.data(), 8, 0, lane.in_memory, &out),
        net().test(receive, &done, nullptr),
        net().close_send(lane.ends.send),
        net().close_receive(lane.ends.receive),
        net().close_listen(listener.comm),
    };
    const auto went_well = std::count(std::begin(results), std::end(results), Result::kSuccess);
    _exit(out != nullptr ? 100 : static_cast<int>(went_well));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  lane.finish(lane.send({0, 1'000, 0}));
  lane.finish(receive);
  lane.expect({0, 1'000, 0}, 0);
}

// NCCL opens what NCCL_NET_PLUGIN names and what a framework has linked: each has all of its own.
TEST(Plugins, TwoInOneProcess) {
  const TemporaryFolder folder;
  const std::string copy = folder.path() + "/libnccl-net-other.so";
  std::filesystem::copy_file(BATON_NCCL_PLUGIN, copy);
  setenv("BATON_NCCL_PROVIDERS", "shm", 1);
  NetRig one, two;
  one.start({.name = "one", .provider = "", .library = BATON_NCCL_PLUGIN});
  two.start({.name = "two", .provider = "", .library = copy});
  {
    Lane a(one, 100'000, 1), b(two, 100'000, 2);
    for (Lane* const lane : {&a, &b, &a}) lane->exchange({0, 100'000, 0}, 0);
    // And to each other.
    const NetRig::Ends ends = Listener(one).meet(two);
    EXPECT_EQ(two.net().close_send(ends.send), Result::kSuccess);
    EXPECT_EQ(one.net().close_receive(ends.receive), Result::kSuccess);
  }
  one.stop();
  two.stop();
}

}  // namespace
}  // namespace baton::nccl

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  constexpr std::string_view kPeer = "--peer=";  // PROVIDER,HANDLE
  if (const std::string argument = argc == 2 ? argv[1] : ""; argument.starts_with(kPeer)) {
    const size_t comma = argument.find(',');
    return baton::nccl::move_for_ever(argument.substr(kPeer.size(), comma - kPeer.size()),
                                      argument.substr(comma + 1));
  }
  return RUN_ALL_TESTS();
}
