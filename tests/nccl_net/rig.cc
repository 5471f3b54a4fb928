// The fixture: what carries the bytes, comms with memory, and proxies.
#include "tests/nccl_net/rig.h"

#include "plugins/nccl/plugin.h"
#include "tests/usable_provider.h"

namespace baton::nccl {

extern "C" const NetV8 ncclNetPlugin_v8;
extern "C" const NetV9 ncclNetPlugin_v9;
extern "C" const NetV10 ncclNetPlugin_v10;
extern "C" const NetV11 ncclNetPlugin_v11;
extern "C" const NetV12 ncclNetPlugin_v12;

namespace {

const void* table_of(int version) {
  const void* const tables[] = {&ncclNetPlugin_v8, &ncclNetPlugin_v9, &ncclNetPlugin_v10,
                                &ncclNetPlugin_v11, &ncclNetPlugin_v12};
  return tables[version - 8];
}

std::byte byte_at(size_t place) {
  return static_cast<std::byte>(place * 0x9e3779b97f4a7c15u >> 56 ^ place);
}

constexpr std::byte kWiped{0xee};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Setup& setup) { return out << setup.name; }

std::string name_of(const testing::TestParamInfo<Setup>& info) { return info.param.name; }

std::vector<Setup> baton_setups() {
  return {{"shm", "shm"},         {"tcp", "tcp"},        {"verbs_fake", "verbs_fake"},
          {"sim", "sim"},         {"shm_v8", "shm", 8},  {"tcp_v9", "tcp", 9},
          {"shm_v10", "shm", 10}, {"tcp_v11", "tcp", 11}};
}

std::vector<Setup> contract_setups() {
  std::vector<Setup> setups = baton_setups();
  if (const char* given = std::getenv("NCCL_NET_UNDER_TEST"); given != nullptr) {
    setups.push_back({"given_library", "", 0, given});
  }
  return setups;
}

void NetRig::start(const Setup& setup) {
  if (!setup.library.empty()) {
    net_ = must(AnyNet::load(setup.library, setup.version));
  } else {
    net_.emplace(table_of(setup.version), setup.version);
    own_ = true;
    unsetenv("BATON_NCCL_PROVIDERS");
    threads_ = setup.provider != "sim" && setup.provider != "verbs_fake";
    if (setup.provider == "sim") {
      fabric_.emplace(sim::SimOptions{.nodes = 2, .rails = 2});
    } else if (setup.provider == "verbs_fake") {
      verbs_ = fake_verbs_surroundings();
      if (verbs_ == nullptr) GTEST_SKIP() << "built without the headers of rdma-core";
    } else if (const std::string why = why_unusable(setup.provider); !why.empty()) {
      GTEST_SKIP() << why;
    } else {
      setenv("BATON_NCCL_PROVIDERS", setup.provider.c_str(), 1);
    }
    Plugin::get().make_workers_by(
        [this](WorkerOptions options, Plugin::Role role) {
          options.key = *ClusterKey::from_bytes("a secret of the NCCL tests");
          if (fabric_) {
            options.clock = &fabric_->clock();
            options.listen_host.clear();
            options.extra_providers = {fabric_->provider_factory(role)};
          } else if (verbs_ != nullptr) {
            options.listen_host.clear();
            verbs_->prepare(options);
          }
          auto worker = Worker::create(std::move(options));
          if (worker.ok() && fabric_) fabric_->attach(**worker, role);
          if (worker.ok()) workers_.push_back(worker->get());
          return worker;
        },
        threads_);
  }
  ASSERT_EQ(net_->init(), Result::kSuccess)
      << testing::PrintToString(NetLog::lines(LogLevel::kWarn));
  int count = 0;
  ASSERT_EQ(net_->devices(&count), Result::kSuccess);
  ASSERT_GE(count, 1);
}

void NetRig::stop() {
  if (net_) net_->finalize();
  if (fabric_) {
    for (Worker* const worker : workers_) fabric_->detach(*worker);
  }
  workers_.clear();
  if (own_) Plugin::get().reset();
  if (verbs_ != nullptr) verbs_->check();
  if (fabric_) {
    EXPECT_THAT(fabric_->violations(), testing::IsEmpty());
  }
  fabric_.reset();
}

void NetRig::turn() {
  if (fabric_) {
    fabric_->run_for(std::chrono::microseconds(5));
  } else if (threads_) {
    std::this_thread::yield();
  } else {
    for (Worker* const worker : workers_) worker->progress();
  }
}

void NetRig::until(const std::function<bool()>& fact, CallSite from) {
  static const uint64_t most = number_of("NCCL_NET_ROUNDS", 0);
  const auto state = [] { return testing::PrintToString(NetLog::lines(LogLevel::kWarn)); };
  uint64_t rounds = 0;
  const auto next = [&] {
    if (++rounds == most) give_up(state(), from);
    turn();
  };
  baton::until(fact, next, state, from);
}

NetRig::Ends NetRig::connect() { return Listener(*this).meet(); }

Listener::Listener(NetRig& rig) : rig_(rig) {
  EXPECT_EQ(rig.net().listen(0, handle.data(), &comm), Result::kSuccess);
}

void Listener::close() {
  if (comm == nullptr) return;
  EXPECT_EQ(rig_.net().close_listen(std::exchange(comm, nullptr)), Result::kSuccess);
}

NetRig::Ends Listener::meet(NetRig& caller) {
  NetRig::Ends ends;
  rig_.until([&] {
    if (ends.send == nullptr) {
      EXPECT_EQ(caller.net().connect(0, handle.data(), &ends.send), Result::kSuccess);
    }
    if (ends.receive == nullptr) {
      EXPECT_EQ(rig_.net().accept(comm, &ends.receive), Result::kSuccess);
    }
    return testing::Test::HasFailure() || (ends.send != nullptr && ends.receive != nullptr);
  });
  return ends;
}

// --- memory --------------------------------------------------------------------------------------

Pages::Pages(size_t bytes)
    : data_(
          static_cast<std::byte*>(mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
      size_(bytes) {}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, std::max<size_t>(size_, 1));
}

void Pages::drop() { EXPECT_EQ(mprotect(data_, size_, PROT_NONE), 0); }

// --- a comm with memory --------------------------------------------------------------------------

Lane::Lane(NetRig& rig, size_t bytes, uint64_t seed)
    : ends(rig.connect()), out(bytes), in(bytes), rig_(rig) {
  for (size_t i = 0; i < bytes; ++i) out.data()[i] = byte_at(i + seed * 7919);
  wipe();
  EXPECT_EQ(net().register_memory(ends.send, out.data(), bytes, &out_memory), Result::kSuccess);
  EXPECT_EQ(net().register_memory(ends.receive, in.data(), bytes, &in_memory), Result::kSuccess);
}

void Lane::wipe() { std::fill(in.data(), in.data() + in.size(), kWiped); }

bool Lane::untouched() const {
  return std::all_of(in.data(), in.data() + in.size(), [](std::byte b) { return b == kWiped; });
}

void* Lane::try_send(const Slot& slot) {
  void* request = nullptr;
  EXPECT_EQ(
      net().send(ends.send, out.data() + slot.offset, slot.bytes, slot.tag, out_memory, &request),
      Result::kSuccess);
  return request;
}

Result Lane::post(const std::vector<Slot>& slots, void** request, bool optional) {
  std::vector<void*> data, memory;
  std::vector<size_t> sizes;
  std::vector<int> tags;
  for (const Slot& slot : slots) {
    data.push_back(in.data() + slot.offset);
    sizes.push_back(slot.bytes);
    tags.push_back(slot.tag);
    memory.push_back(in_memory);
  }
  return net().receive(ends.receive, static_cast<int>(slots.size()), data.data(), sizes.data(),
                       tags.data(), memory.data(), request, optional);
}

void* Lane::try_receive(const std::vector<Slot>& slots, bool optional) {
  void* request = nullptr;
  EXPECT_EQ(post(slots, &request, optional), Result::kSuccess);
  return request;
}

void* Lane::send(const Slot& slot) {
  void* request = nullptr;
  rig_.until([&] { return (request = try_send(slot)) != nullptr || testing::Test::HasFailure(); });
  return request;
}

void* Lane::receive(const std::vector<Slot>& slots, bool optional) {
  void* request = nullptr;
  rig_.until([&] {
    return (request = try_receive(slots, optional)) != nullptr || testing::Test::HasFailure();
  });
  return request;
}

bool Lane::tested(void* request, int* sizes) {
  int done = 0;
  EXPECT_EQ(net().test(request, &done, sizes), Result::kSuccess);
  return done != 0;
}

void Lane::finish(void* request, int* sizes, CallSite from) {
  rig_.until([&] { return tested(request, sizes) || testing::Test::HasFailure(); }, from);
}

void Lane::finish(void* send, int* sent, void* receive, int* received, CallSite from) {
  bool send_done = false, receive_done = false;
  rig_.until(
      [&] {
        send_done = send_done || tested(send, sent);
        receive_done = receive_done || tested(receive, received);
        return (send_done && receive_done) || testing::Test::HasFailure();
      },
      from);
}

void Lane::exchange(const Slot& slot, size_t from) {
  void* const request = receive({slot});
  finish(send({from, slot.bytes, slot.tag}), nullptr, request, nullptr);
  expect(slot, from);
}

Result Lane::fails(void* request, CallSite from) {
  Result result = Result::kSuccess;
  rig_.until(
      [&] {
        int done = 0;
        result = net().test(request, &done, nullptr);
        return done != 0 || result != Result::kSuccess;
      },
      from);
  return result;
}

void Lane::expect(const Slot& slot, size_t sent_from) {
  EXPECT_EQ(std::memcmp(in.data() + slot.offset, out.data() + sent_from, slot.bytes), 0)
      << slot.bytes << " bytes at " << slot.offset << " differ from those sent from " << sent_from;
}

void Lane::close_send() {
  if (ends.send == nullptr) return;
  EXPECT_EQ(net().close_send(ends.send), Result::kSuccess);
  ends.send = nullptr;
}

void Lane::close_receive() {
  if (ends.receive == nullptr) return;
  EXPECT_EQ(net().close_receive(ends.receive), Result::kSuccess);
  ends.receive = nullptr;
}

void Lane::close() {
  if (ends.send != nullptr && out_memory != nullptr) net().deregister(ends.send, out_memory);
  if (ends.receive != nullptr && in_memory != nullptr) net().deregister(ends.receive, in_memory);
  out_memory = in_memory = nullptr;
  close_send();
  close_receive();
}

// --- proxies -------------------------------------------------------------------------------------

void Proxy::step() {
  if (posted_ < steps_ && requests_.size() < depth_) {
    if (void* const request = post_(posted_); request != nullptr) {
      requests_.push_back(request);
      ++posted_;
    }
  }
  if (requests_.empty()) return;
  int sizes[8] = {};
  if (!lane_.tested(requests_.front(), sizes)) return;
  requests_.pop_front();
  done_(tested_++, sizes);
}

std::vector<Group> steady(size_t groups, size_t room) {
  std::vector<Group> plan;
  for (size_t i = 0; i < groups; ++i) plan.push_back({{{i % 8 * room, room, 0}, room - i % 100}});
  return plan;
}

Traffic::Traffic(Lane& lane, std::vector<Group> plan) : lane_(lane), plan_(std::move(plan)) {
  std::mt19937 random(13);
  for (Group group : plan_) {
    std::shuffle(group.begin(), group.end(), random);
    for (const Message& message : group) {
      sends_.push_back({message.to.offset, message.bytes, message.to.tag});
    }
  }
  proxies_.emplace_back(
      lane, sends_.size(), 32, [this](size_t step) { return lane_.try_send(sends_[step]); },
      [](size_t, const int*) {});
  proxies_.emplace_back(
      lane, plan_.size(), 8,
      [this](size_t step) {
        std::vector<Slot> slots;
        for (const Message& message : plan_[step]) slots.push_back(message.to);
        return lane_.try_receive(slots);
      },
      [this](size_t step, const int* sizes) { look(step, sizes); });
}

void Traffic::look(size_t group, const int* sizes) {
  for (const auto& [to, bytes] : plan_[group]) {
    ASSERT_EQ(*sizes++, static_cast<int>(bytes)) << "group " << group << ", tag " << to.tag;
    lane_.expect({to.offset, bytes, 0}, to.offset);
  }
  if (on_group) on_group(group);
}

void run(NetRig& rig, const std::vector<Traffic*>& all) {
  std::vector<Proxy*> proxies;
  for (Traffic* const traffic : all) {
    for (Proxy& proxy : traffic->proxies()) proxies.push_back(&proxy);
  }
  if (!rig.threads()) {
    rig.until([&] {
      for (Proxy* const proxy : proxies) proxy->step();
      return testing::Test::HasFailure() ||
             std::all_of(proxies.begin(), proxies.end(), [](Proxy* one) { return one->done(); });
    });
    return;
  }
  std::vector<std::thread> threads;
  for (Proxy* const proxy : proxies) {
    threads.emplace_back([&rig, proxy] {
      rig.until([&] {
        proxy->step();
        return proxy->done() || testing::Test::HasFailure();
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace baton::nccl
