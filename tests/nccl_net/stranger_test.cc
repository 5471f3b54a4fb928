// Calls that NCCL does not make, and any calls in any order: an error code and a line of the log,
// no crash, no hang, and what is right goes on.
#include "tests/nccl_net/rig.h"
#include "tests/seeds.h"
#include "tests/used.h"

namespace baton::nccl {
namespace {

TEST_P(BatonNet, WhatIsClosedTwiceIsAnError) {
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
  const NetRig::Ends ends = lane.ends;
  EXPECT_EQ(net().close_send(ends.receive), Result::kInvalidArgument);
  EXPECT_EQ(net().close_receive(ends.send), Result::kInvalidArgument);
  lane.close();
  EXPECT_EQ(net().close_send(ends.send), Result::kInvalidArgument);
  EXPECT_EQ(net().close_receive(ends.receive), Result::kInvalidArgument);
  void* out = nullptr;
  EXPECT_EQ(net().send(ends.send, lane.out.data(), 8, 0, nullptr, &out), Result::kInvalidArgument);
  EXPECT_EQ(net().register_memory(ends.send, lane.out.data(), 8, &out), Result::kInvalidArgument);
  EXPECT_EQ(net().deregister(ends.receive, lane.out.data()), Result::kInvalidArgument);
  int size = 0;
  EXPECT_EQ(net().flush(ends.receive, 1, &out, &size, &out, &out), Result::kInvalidArgument);
  Listener listener(rig);
  void* const listens = listener.comm;
  EXPECT_EQ(net().close_send(listens), Result::kInvalidArgument);
  listener.close();
  EXPECT_EQ(net().close_listen(listens), Result::kInvalidArgument);
  EXPECT_EQ(net().accept(listens, &out), Result::kInvalidArgument);
  EXPECT_EQ(out, nullptr);
}

// Promise(nccl): Memory that was deregistered, or is another comm's, is an error of every call that
//   names it, and what is right goes on | gone, gone with its comm, of another comm, of the other
//   end, a comm, an address and numbers that were never given
TEST_P(BatonNet, MemoryThatIsGoneOrAnothersIsAnError) {
  Lane lane(rig, 1'000), other(rig, 1'000);
  struct Case {
    const char* what;
    void *out, *in;
  };
  std::vector<Case> cases = {
      {"another comm's", other.out_memory, other.in_memory},
      {"the other end's", lane.in_memory, lane.out_memory},
      {"a comm", lane.ends.send, lane.ends.receive},
      {"an address", lane.out.data(), lane.in.data()},
      {"a number", static_cast<char*>(lane.out_memory) + 500,
       static_cast<char*>(lane.in_memory) + 500},
  };
  Case gone{"deregistered", nullptr, nullptr};
  for (const auto& [comm, pages, memory] : {std::tuple{lane.ends.send, &lane.out, &gone.out},
                                            {lane.ends.receive, &lane.in, &gone.in}}) {
    ASSERT_EQ(net().register_memory(comm, pages->data(), 999, memory), Result::kSuccess);
    ASSERT_EQ(net().deregister(comm, *memory), Result::kSuccess);
  }
  cases.push_back(gone);
  {
    Lane closed(rig, 1'000);
    cases.push_back({"a closed comm's", closed.out_memory, closed.in_memory});
    closed.close_send();
    closed.close_receive();  // with its memory
    closed.out_memory = closed.in_memory = nullptr;
  }
  void* const receive = lane.receive({{0, 1'000, 0}});
  void* request = nullptr;
  for (Case& bad : cases) {
    SCOPED_TRACE(bad.what);
    until([&] {
      const Result result = net().send(lane.ends.send, lane.out.data(), 8, 0, bad.out, &request);
      return result == Result::kInvalidArgument || request != nullptr;
    });
    void* data = lane.in.data();
    int small = 8;
    EXPECT_EQ(net().receive_one(lane.ends.receive, data, 8, 0, bad.in, &request),
              Result::kInvalidArgument);
    EXPECT_EQ(net().flush(lane.ends.receive, 1, &data, &small, &bad.in, &request),
              Result::kInvalidArgument);
    EXPECT_EQ(net().deregister(lane.ends.send, bad.out), Result::kInvalidArgument);
    EXPECT_EQ(net().deregister(lane.ends.receive, bad.in), Result::kInvalidArgument);
    ASSERT_EQ(request, nullptr);
  }
  lane.finish(lane.send({0, 1'000, 0}), nullptr, receive, nullptr);
  lane.expect({0, 1'000, 0}, 0);
  other.exchange({0, 1'000, 0}, 0);
}

TEST_P(BatonNet, MissingArgumentsAndMadeUpRequestsAreErrors) {
  Lane lane(rig, 1'000);
  Listener one(rig), other(rig);
  HandleBuffer &first = one.handle, &second = other.handle;
  void *out = nullptr, *made = nullptr;
  void* const receive = lane.receive({{0, 1'000, 0}});
  until([&] {  // a byte before its memory
    return net().send(lane.ends.send, lane.out.data() - 1, 8, 0, lane.out_memory, &made) ==
           Result::kInvalidArgument;
  });
  void* const send = lane.send({0, 1'000, 0});
  const auto with_index = [](void* request, uintptr_t index) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(request) & ~uintptr_t{0xffff}) |
                                   index);
  };
  int done = 0;
  const auto test = [&](void* request) { return net().test(request, &done, nullptr); };
  // A connect that is under way, with another's handle.
  ASSERT_EQ(net().connect(0, first.data(), &out), Result::kSuccess);
  constexpr size_t kConnecting = 112;
  std::copy_n(first.begin() + kConnecting, 8, second.begin() + kConnecting);
  for (const auto& [what, result] : std::initializer_list<std::pair<const char*, Result>>{
           {"connect, no place", net().connect(0, second.data(), nullptr)},
           {"connect, another's handle", net().connect(0, second.data(), &made)},
           {"connect, no device", net().connect(99, first.data(), &made)},
           {"accept, no place", net().accept(one.comm, nullptr)},
           {"register, no place",
            net().register_memory(lane.ends.send, lane.out.data(), 8, nullptr)},
           {"isend, no request",
            net().send(lane.ends.send, lane.out.data(), 8, 0, lane.out_memory, nullptr)},
           {"test, no answer", net().test(send, nullptr, nullptr)},
           {"no such send", test(with_index(send, 0xffff))},
           {"no such receive", test(with_index(receive, 0xffff))},
           {"a send that never was", test(with_index(send, 200))},
           {"a receive that never was", test(with_index(receive, 20))}}) {
    EXPECT_EQ(result, Result::kInvalidArgument) << what;
  }
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(net().receive_one(lane.ends.receive, lane.in.data() - 8, 8, 0, lane.in_memory, &made),
            Result::kInvalidArgument)
      << "before its memory";
  lane.finish(send, nullptr, receive, nullptr);
  EXPECT_EQ(out, nullptr);
  const NetRig::Ends ends = one.meet();
  EXPECT_EQ(net().close_send(ends.send), Result::kSuccess);
  EXPECT_EQ(net().close_receive(ends.receive), Result::kSuccess);
}

TEST_P(BatonNet, HandlesOfRandomBytesAreRefused) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 1'000; ++i) {
    HandleBuffer handle;
    for (char& byte : handle) byte = static_cast<char>(random());
    void* send = nullptr;
    ASSERT_NE(net().connect(0, handle.data(), &send), Result::kSuccess);
    ASSERT_EQ(send, nullptr);
  }
}

// NCCL_NET_COMMS=10000 takes a minute, and finds no more than 300 do.
TEST_P(BatonNet, ThousandsOfCommsLeaveNothingBehind) {
  const uint64_t comms = number_of("NCCL_NET_COMMS", rig.threads() && !kSanitized ? 300 : 40);
  const auto open = [&](uint64_t i) {
    Lane lane(rig, 256, i);
    if (i % 2 == 0) lane.exchange({0, 256, 0}, 0);
  };
  for (uint64_t i = 0; i < 20; ++i) open(i);
  const Used before;
  for (uint64_t i = 0; i < comms; ++i) open(i);
  EXPECT_LE(Used().descriptors, before.descriptors + 2);
}

// One comm, as a program without a plan uses it, and what must come of each call.
class RandomCalls {
 public:
  RandomCalls(NetRig& rig, uint64_t seed) : rig_(rig), random_(seed), lane_(rig, kRoom, seed) {}

  void run() {
    const size_t calls = pick(60);
    for (size_t i = 0; i < calls && !testing::Test::HasFailure(); ++i) {
      switch (pick(8)) {
        case 0:
        case 1:
          receive();
          break;
        case 2:
        case 3:
        case 4:
          send();
          break;
        case 5:
          test_one();
          break;
        case 6:
          stranger();
          break;
        default:
          if (pick(20) == 0) close_one();
      }
    }
    if (pick(4) != 0) finish();
    lane_.close();  // in whatever state
    for (const Request& request : requests_) expect_stale(request.handle);
  }

 private:
  static constexpr size_t kRoom = 64 << 10, kMost = 2'000;
  struct Posted {
    Slot slot;
    bool sent = false;
    size_t bytes = 0, from = 0;  // of what was sent
  };
  struct Request {
    void* handle = nullptr;
    bool sends = false;
    size_t bytes = 0;            // of a send
    std::deque<Posted> slots{};  // of a receive
  };
  size_t pick(size_t below) { return random_() % below; }
  AnyNet& net() { return lane_.net(); }
  bool open() const { return lane_.ends.send != nullptr && lane_.ends.receive != nullptr; }

  void receive() {
    // What has been posted has places of its own until it was looked at.
    if (lane_.ends.receive == nullptr || receives_ == 3) return;
    Request made;
    std::vector<Slot> slots;
    for (size_t i = 0, n = 1 + pick(8); i < n; ++i) {
      const size_t at = next_place_++ % (kRoom / kMost - 1) * kMost;
      slots.push_back({at, pick(kMost), static_cast<int>(next_tag_++)});
      made.slots.push_back({slots.back()});
    }
    if (!open()) {
      made.handle = refused_or_made([&](void** request) { return lane_.post(slots, request); });
    } else {
      made.handle = lane_.try_receive(slots);
      ASSERT_NE(made.handle, nullptr) << "with " << requests_.size() << " requests open";
    }
    if (made.handle == nullptr) return;
    requests_.push_back(std::move(made));
    ++receives_;
  }
  // Once one side is closed a call may find out, or not yet.
  template <typename Call>
  void* refused_or_made(const Call& call) {
    void* request = nullptr;
    const Result result = call(&request);
    EXPECT_TRUE(result == Result::kSuccess || result == Result::kRemoteError) << result;
    EXPECT_TRUE(result == Result::kSuccess || request == nullptr);
    return request;
  }

  void send() {
    if (lane_.ends.send == nullptr) return;
    std::vector<Posted*> free;
    for (Request& request : requests_) {
      for (Posted& posted : request.slots) {
        if (!posted.sent) free.push_back(&posted);
      }
    }
    const size_t bytes = pick(kMost + 500), from = pick(kRoom - bytes);
    if (free.empty() || !open()) {
      void* const request = refused_or_made([&](void** made) {
        return net().send(lane_.ends.send, lane_.out.data() + from, bytes, -7, lane_.out_memory,
                          made);
      });
      EXPECT_EQ(request, nullptr) << "no receive has this tag";
      return;
    }
    Posted& to = *free[pick(free.size())];
    to = {to.slot, true, std::min(bytes, to.slot.bytes), from};
    Request made{.sends = true, .bytes = to.bytes};
    made.handle = lane_.send({from, bytes, to.slot.tag});
    requests_.push_back(std::move(made));
  }

  // True: it has ended, as it must.
  bool test(Request& request) {
    int done = 0;
    std::array<int, 8> sizes{};
    const Result result = net().test(request.handle, &done, sizes.data());
    if (!open()) {
      EXPECT_TRUE(result == Result::kSuccess || result == Result::kRemoteError) << result;
      return result != Result::kSuccess || done != 0;
    }
    EXPECT_EQ(result, Result::kSuccess);
    if (done == 0) return false;
    expect_stale(request.handle);
    EXPECT_TRUE(!request.sends || sizes[0] == static_cast<int>(request.bytes)) << sizes[0];
    for (size_t i = 0; i < request.slots.size(); ++i) {
      const Posted& posted = request.slots[i];
      EXPECT_TRUE(posted.sent) << "it is done before slot " << i << " was sent";
      EXPECT_EQ(sizes[i], static_cast<int>(posted.bytes));
      lane_.expect({posted.slot.offset, posted.bytes, 0}, posted.from);
    }
    return true;
  }
  void test_one() {
    if (requests_.empty()) return;
    const auto at = requests_.begin() + static_cast<ptrdiff_t>(pick(requests_.size()));
    if (!own_side_open(*at) || !test(*at)) return;
    receives_ -= at->sends ? 0 : 1;
    requests_.erase(at);
  }
  bool own_side_open(const Request& request) const {
    return (request.sends ? lane_.ends.send : lane_.ends.receive) != nullptr;
  }
  void expect_stale(void* handle) {
    int done = 0;
    EXPECT_EQ(net().test(handle, &done, nullptr), Result::kInvalidArgument);
    EXPECT_EQ(done, 0);
  }

  void stranger() {
    NetLog::forget();
    void* out = nullptr;
    int done = 0;
    void* data = lane_.in.data();
    const auto number = static_cast<uintptr_t>(random_());
    const int device = static_cast<int>(number % 1'000) + 100;
    HandleBuffer handle;
    handle.fill(static_cast<char>(number));
    const Result results[] = {
        net().test(reinterpret_cast<void*>(number), &done, nullptr),
        net().close_send(reinterpret_cast<void*>(number | 1 << 20)),
        net().close_listen(lane_.ends.send),
        net().connect(0, handle.data(), &out),
        net().accept(lane_.ends.receive, &out),
        net().receive_one(lane_.ends.send, data, 8, 0, lane_.in_memory, &out),
        net().send(lane_.ends.receive, data, 8, 0, lane_.out_memory, &out),
        net().listen(device, handle.data(), &out),
        net().register_dma_buf(lane_.ends.send, data, 8, 0, -device, &out),
        net().deregister(lane_.ends.receive, data),
    };
    EXPECT_THAT(results, testing::Each(testing::Ne(Result::kSuccess)));
    EXPECT_EQ(out, nullptr);
    EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::SizeIs(testing::Ge(std::size(results))));
  }

  void close_one() {
    if (!open()) return;
    pick(2) == 0 ? lane_.close_send() : lane_.close_receive();
  }

  // What can end does.
  void finish() {
    for (Request& request : requests_) {
      if (!own_side_open(request)) continue;
      for (Posted& posted : request.slots) {
        if (posted.sent || !open()) continue;
        posted = {posted.slot, true, 0, 0};
        void* const sent = lane_.send({0, 0, posted.slot.tag});
        rig_.until([&] { return lane_.tested(sent) || testing::Test::HasFailure(); });
      }
    }
    for (Request& request : requests_) {
      if (!own_side_open(request)) continue;
      rig_.until([&] { return test(request) || testing::Test::HasFailure(); });
    }
    std::erase_if(requests_, [&](const Request& request) { return own_side_open(request); });
  }

  NetRig& rig_;
  std::mt19937_64 random_;
  Lane lane_;
  std::deque<Request> requests_;
  size_t receives_ = 0, next_place_ = 0, next_tag_ = 1;
};

// Promise(nccl): Calls in any order keep the contract, and those that make no sense are an error
//   with a line of the log | 2,000 random sequences from seeds over shm, fewer elsewhere: what is
//   posted, sent, tested, closed, foreign or stale, and every byte and size that must come of it
TEST_P(BatonNet, RandomCallsKeepTheContract) {
  const bool many = GetParam().name == "shm" && !kSanitized;
  const Seeds seeds(many ? 2'000 : 60);
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RandomCalls(rig, seed).run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace baton::nccl
