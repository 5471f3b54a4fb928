// A fake of the verbs calls, in this process: devices, queue pairs and a network between them, with
// the rules of a real adapter and none of the leniency of soft-RoCE.
//
//   FakeVerbs fake({.devices = 2});
//   WorkerOptions{.extra_providers = {verbs::verbs_over(fake.api())}};
//   fake.set_port(0, false);                        // IBV_EVENT_PORT_ERR, and nothing gets through
//   EXPECT_THAT(fake.violations(), IsEmpty());
//
// All devices are on one machine and one network, as loopback through an adapter is; whoever opens
// a device has its own context. Work moves when somebody polls a completion queue, by at most
// `bytes_per_poll`, queue pairs in turn; arming a completion queue lets everything finish, because
// whoever arms is about to sleep. Timeouts go by `clock`. Nothing else happens by itself, so in one
// thread everything follows from the calls made.
//
// Refused, and put in violations(): more work than the queue holds (a slot is free only when the
// completion of it, or of a later one, has been polled), a queue full of unsignalled work,
// messages, inline data or gather lists beyond the limits, atomics that are not aligned, queue
// pairs moved through wrong states or with attributes missing, RESET with work outstanding, a
// receive queue, shared or not, or a completion queue that overflows, ends that disagree about MTU,
// packet numbers or reads, objects destroyed while others use them.
#pragma once

#include "tests/std.h"
#include "transport/clock.h"
#include "verbs/device/verbs_api.h"

namespace baton {

struct FakeOptions {
  size_t devices = 1;
  const Clock* clock = nullptr;  // steady
  size_t bytes_per_poll = 64 << 10;
  ibv_mtu mtu = IBV_MTU_4096;
  uint32_t max_message = 8 << 20;
  int max_work = 4096;  // per queue
  int max_sge = 30;
  int max_sge_rd = 30;  // of a read
  uint32_t max_inline = 256;
  int max_reads = 16;
  int max_shared = 8192;              // entries of a shared receive queue; 0: there is none
  size_t pinnable_bytes = SIZE_MAX;   // RLIMIT_MEMLOCK, per device context
  size_t max_regions = SIZE_MAX;      // per device context
  size_t max_queue_pairs = SIZE_MAX;  // of all devices together
  bool dma_buf = true;                // the driver can
  size_t window_bytes = SIZE_MAX;     // of dma-bufs (BAR1), each
  // Finds memory of devices by its address, as nvidia-peermem does: a descriptor that the fake
  // closes, and where in it; -1: there is none. Without it a device's address is refused.
  std::function<int(const void* address, size_t bytes, uint64_t* offset)> peer_memory = nullptr;
  // What a registration of device memory is worth that succeeds: it works, its accesses fail, or
  // they go to other bytes; and so does writing alone.
  enum class Worth : uint8_t { kGood, kRefused, kElsewhere, kWritesElsewhere };
  Worth dma_buf_worth = Worth::kGood;
  Worth address_worth = Worth::kGood;
  uint32_t late_writes = 0;     // not 0: writes to dma-bufs land late, by this seed
  std::vector<uint8_t> speeds;  // ibv_port_attr::active_speed of each device (default: 25 Gb/s)
};

struct FakeStats {
  uint64_t doorbells = 0;
  uint64_t work = 0;
  uint64_t signalled = 0;
  uint64_t inlined = 0;
  uint64_t gathered = 0;  // with more than one piece of local memory
  uint64_t immediates = 0;
  uint64_t not_ready = 0;  // a message found no receive
  uint64_t flushed = 0;
  uint64_t queue_pairs = 0;  // made
  uint64_t dma_bufs = 0;     // registered through one
  uint64_t by_address = 0;   // memory of a device
  uint64_t landed_late = 0;  // after their sender's queue pair had ended
};

struct FakeQp;
struct FakeCq;
struct FakeSrq;
struct FakeContext;
struct FakeMr;
struct FakeReceive;

verbs::VerbsApi fake_calls();

class FakeVerbs {
 public:
  explicit FakeVerbs(const FakeOptions& options = {});  // one at a time in a process
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  const verbs::VerbsApi& api() const { return api_; }

  // From here on nothing moves, and work is done as soon as it is posted: what remains is the cost
  // of the caller. For good.
  void become_weightless();
  // Of a weightless one: when a doorbell was rung last goes here; null: nowhere.
  static void note_doorbells(std::chrono::steady_clock::time_point* at);

  // --- faults ---
  void set_port(size_t device, bool up);  // with its event
  // Silently: what is sent is lost.
  void set_cable(size_t device, bool in) { set(devices_[device].cable, in); }
  // Messages arrive there, acknowledgements are lost.
  void set_mute(size_t device, bool mute) { set(devices_[device].mute, mute); }
  // Work started there never completes.
  void set_hanging(size_t device, bool hanging) { set(devices_[device].hanging, hanging); }
  void kill(size_t device);  // IBV_EVENT_DEVICE_FATAL; nothing completes
  void set_gids(size_t device, std::vector<ibv_gid_entry> gids);  // IBV_EVENT_GID_CHANGE
  void break_queue_pairs(size_t device);                          // IBV_EVENT_QP_FATAL

  void break_completion_queues(size_t device);  // IBV_EVENT_CQ_ERR; nothing comes out of them
  void break_shared_receives(size_t device);    // IBV_EVENT_SRQ_ERR; nothing comes in any more
  // A queue pair that breaks has begun to receive one message, and lets go of the shared receive
  // for it only when its completion queue has been polled so often; 0: at once.
  void set_slow_to_stop(int polls) { set(slow_to_stop_, polls); }

  // From now on, packets of a write that are on their way when their sender's queue pair ends
  // arrive after so many polls, if the queue pair that they are for is still connected; 0: they are
  // lost.
  void set_late_packets(int polls) { set(late_packets_, polls); }

  // As late_writes, from now on.
  void set_late_writes(uint32_t seed);
  // What was written to dma-bufs is there from now on.
  void land_writes();

  void take_receives(size_t device);  // those that are posted are gone, and never complete
  void set_max_queue_pairs(size_t most) { set(options_.max_queue_pairs, most); }

  std::vector<std::string> violations() const { return get(violations_); }
  FakeStats stats() const { return get(stats_); }
  size_t shared_receives() const;                   // posted
  size_t objects() const { return get(objects_); }  // contexts, domains, regions, queues
  // Bytes of work begun there.
  uint64_t moved(size_t device) const { return get(devices_[device].moved); }
  std::vector<ibv_gid_entry> gids(size_t device) const { return devices_[device].gids; }
  std::vector<ibv_qp_attr> connected() const;  // queue pairs
  bool port_up(size_t device) const { return devices_[device].port_up; }
  // Packets get through there.
  bool linked(size_t device) const;
  ibv_mtu mtu() const { return options_.mtu; }
  // RoCEv2 over IPv4 10.0.<device>.1 and link-local IPv6, both also as RoCEv1.
  static std::vector<ibv_gid_entry> default_gids(size_t device);

 private:
  // The functions of the table.
  friend struct FakeCall;
  friend struct FakeDeviceCalls;
  friend struct FakeMemoryCalls;
  friend struct FakeCompletionCalls;
  friend struct FakeQueueCalls;
  struct FakeDevice {
    ibv_device device{};
    std::vector<ibv_gid_entry> gids;
    bool port_up = true;
    bool cable = true;
    bool mute = false;
    bool hanging = false;
    bool dead = false;
    uint64_t moved = 0;
  };

  template <typename T>
  T get(const T& what) const {
    const std::lock_guard lock(mutex_);
    return what;
  }
  template <typename T>
  void set(T& what, T to) {
    const std::lock_guard lock(mutex_);
    what = to;
  }
  Time now() const { return options_.clock->now(); }
  void violation(std::string what);
  size_t index_of(const ibv_device* device) const;
  void raise(size_t device, ibv_event_type type);
  FakeMr* find_region(uint32_t key) const;
  std::byte* reach(uint32_t key, uint64_t address, bool written = false) const;
  ibv_mr* map(ibv_mr* made, int fd, uint64_t offset, FakeOptions::Worth worth);
  FakeQp* find_queue_pair(uint32_t number) const;

  // The network (fake_wire.cc).
  void run(size_t bytes);
  bool advance(FakeQp& qp, size_t& bytes);
  bool reachable(FakeQp& qp, FakeQp*& peer);
  bool wait(FakeQp& qp, Time limit, ibv_wc_status status);
  ibv_wc_status check_local(const FakeQp& qp, bool written) const;
  bool check_remote(const FakeQp& qp, const FakeQp& peer, uint64_t bytes, unsigned right);
  bool lies_late(const std::byte* at) const;
  void put(std::byte* to, const std::byte* from, size_t bytes);
  void land();
  void leave_on_the_way(FakeQp& qp);
  void arrive();
  void copy(FakeQp& qp, std::byte* remote, size_t at, size_t bytes, bool to_local);
  void refuse(FakeQp& qp, FakeQp& peer, ibv_wc_status here);
  bool deliver(FakeQp& qp, FakeQp& peer, bool immediate);
  static void report(FakeQp& qp, ibv_event_type type);
  static void report(FakeContext& context, const ibv_async_event& event);
  void complete(FakeQp& qp, ibv_wc_status status);
  void to_error(FakeQp& qp);
  void flush(FakeQp& qp, const FakeReceive& receive);
  void let_go(FakeCq& queue);
  void push(FakeCq& queue, const ibv_wc& completion, FakeQp* sender, uint32_t retires);
  int post(FakeQp& qp, const ibv_send_wr& request);

  static FakeVerbs* current_;

  FakeOptions options_;
  verbs::VerbsApi api_;
  mutable std::mutex mutex_;
  std::vector<FakeDevice> devices_;
  std::vector<std::unique_ptr<FakeContext>> contexts_;
  std::vector<FakeMr*> regions_;      // by key
  std::vector<FakeQp*> queue_pairs_;  // by number
  std::vector<FakeQp*> running_;      // in turn
  std::vector<FakeSrq*> shared_;
  std::vector<FakeCq*> completion_queues_;
  struct Late {
    std::byte* to;
    std::vector<std::byte> bytes;
  };
  std::vector<Late> late_;
  struct OnTheWay {
    uint32_t from = 0;  // queue pairs
    uint32_t to = 0;
    uint32_t key = 0;
    uint64_t address = 0;
    int polls = 0;
    std::vector<std::byte> bytes;
  };
  std::vector<OnTheWay> on_the_way_;
  int late_packets_ = 0;
  std::minstd_rand late_random_;
  size_t turn_ = 0;
  size_t objects_ = 0;
  int slow_to_stop_ = 0;
  std::atomic<bool> fork_safe_{false};
  FakeStats stats_;
  std::vector<std::string> violations_;
};

}  // namespace baton
