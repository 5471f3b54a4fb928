// The fixture of the harness: a plugin, what carries its bytes, and both ends of a comm in one
// process. A case asks for what NCCL's proxy threads do and looks at every byte.
//
// NCCL_NET_UNDER_TEST=/path/libnccl-net-x.so runs the cases of the contract (Contract) over that.
#pragma once

#include "tests/conformance/harness.h"
#include "tests/nccl_net/any_net.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::nccl {

// What a case runs over.
struct Setup {
  std::string name;
  std::string provider;  // of Baton; "": `library`
  int version = 12;
  std::string library;
};
std::ostream& operator<<(std::ostream& out, const Setup& setup);
std::vector<Setup> baton_setups();     // every provider, and every version
std::vector<Setup> contract_setups();  // and what NCCL_NET_UNDER_TEST names
std::string name_of(const testing::TestParamInfo<Setup>& info);

using HandleBuffer = std::array<char, kHandleBytes>;

class NetRig {
 public:
  void start(const Setup& setup);  // may skip
  void stop();
  AnyNet& net() { return *net_; }
  // Whether several threads may call the plugin: sim and the fake of verbs have one.
  bool threads() const { return threads_; }
  size_t workers() const { return workers_.size(); }  // that Baton's plugin has made
  // Lets what is under way go on.
  void turn();
  // NCCL_NET_ROUNDS: it gives up behind so many turns, and not by a clock (`mutants`).
  void until(const std::function<bool()>& fact, CallSite from = CallSite::here());

  struct Ends {
    void* send = nullptr;
    void* receive = nullptr;
  };
  // Listens, connects, accepts and closes the listener, as NCCL does.
  Ends connect();

 private:
  std::optional<AnyNet> net_;
  bool threads_ = true;
  bool own_ = false;
  std::optional<sim::SimFabric> fabric_;
  std::vector<Worker*> workers_;
  std::unique_ptr<Surroundings> verbs_;
};

class Listener {
 public:
  explicit Listener(NetRig& rig);
  ~Listener() { close(); }
  void close();
  // Both ends of a call, which `caller` makes.
  NetRig::Ends meet(NetRig& caller);
  NetRig::Ends meet() { return meet(rig_); }

  HandleBuffer handle{};
  void* comm = nullptr;

 private:
  NetRig& rig_;
};

// Memory that is no pool's: what NCCL registers.
class Pages {
 public:
  explicit Pages(size_t bytes);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // A buffer that is freed though it is registered; its addresses are given to no other thread.
  void drop();

 private:
  std::byte* data_;
  size_t size_;
};

struct Slot {
  size_t offset = 0;
  size_t bytes = 0;
  int tag = 0;
};

// A comm with memory at both ends. Sent bytes follow from their place.
class Lane {
 public:
  Lane(NetRig& rig, size_t bytes, uint64_t seed = 1);
  ~Lane() { close(); }

  AnyNet& net() { return rig_.net(); }
  // One call; null: ask again.
  void* try_send(const Slot& slot);
  Result post(const std::vector<Slot>& slots, void** request, bool optional = false);
  void* try_receive(const std::vector<Slot>& slots, bool optional = false);
  // Until it is taken.
  void* send(const Slot& slot);
  void* receive(const std::vector<Slot>& slots, bool optional = false);
  bool tested(void* request, int* sizes = nullptr);
  void finish(void* request, int* sizes = nullptr, CallSite from = CallSite::here());
  // A send and its receive, tested in turns: some plugins move bytes only then.
  void finish(void* send, int* sent, void* receive, int* received,
              CallSite from = CallSite::here());
  // Sends to a slot, and looks at what has come.
  void exchange(const Slot& slot, size_t from);
  // What test() says in the end of an operation that must fail.
  Result fails(void* request, CallSite from = CallSite::here());
  // The bytes of the receiver's slot are those that were sent from `from`; nothing else moved.
  void expect(const Slot& slot, size_t sent_from);
  void wipe();
  bool untouched() const;  // since it was wiped

  void close_send();
  void close_receive();
  void close();

  NetRig& rig() { return rig_; }
  NetRig::Ends ends;
  Pages out, in;
  void* out_memory = nullptr;
  void* in_memory = nullptr;

 private:
  NetRig& rig_;
};

// What NCCL's progress thread does for one comm: up to `depth` steps in flight, and only the oldest
// is tested.
class Proxy {
 public:
  using Post = std::function<void*(size_t step)>;  // null: ask again
  using Done = std::function<void(size_t step, const int* sizes)>;
  Proxy(Lane& lane, size_t steps, size_t depth, Post post, Done done)
      : lane_(lane), steps_(steps), depth_(depth), post_(std::move(post)), done_(std::move(done)) {}
  bool done() const { return tested_ == steps_; }
  void step();

 private:
  Lane& lane_;
  const size_t steps_, depth_;
  const Post post_;
  const Done done_;
  size_t posted_ = 0, tested_ = 0;
  std::deque<void*> requests_;
};

// What is sent to a slot, from the same place.
struct Message {
  Slot to;
  size_t bytes = 0;
};
using Group = std::vector<Message>;  // of different tags
// So many groups of one message each, in eight places.
std::vector<Group> steady(size_t groups, size_t room);

// Both proxies of a comm, through which groups go, each sent in any order: every one must bring its
// bytes to their places.
class Traffic {
 public:
  Traffic(Lane& lane, std::vector<Group> plan);
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;
  std::vector<Proxy>& proxies() { return proxies_; }
  std::function<void(size_t group)> on_group;  // when it has come

 private:
  void look(size_t group, const int* sizes);

  Lane& lane_;
  const std::vector<Group> plan_;
  std::vector<Slot> sends_;
  std::vector<Proxy> proxies_;
};
// All of their proxies, on threads of their own where the rig has them.
void run(NetRig& rig, const std::vector<Traffic*>& all);

class NetTest : public testing::TestWithParam<Setup> {
 public:
  void SetUp() override {
    NetLog::forget();
    rig.start(GetParam());
  }
  void TearDown() override { rig.stop(); }
  AnyNet& net() { return rig.net(); }
  void until(const std::function<bool()>& fact, CallSite from = CallSite::here()) {
    rig.until(fact, from);
  }
  NetRig rig;
};
// What any plugin has to do, and what Baton's does beyond.
class Contract : public NetTest {};
class BatonNet : public NetTest {};

}  // namespace baton::nccl
