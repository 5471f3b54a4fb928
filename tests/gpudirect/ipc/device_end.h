// One of two processes that share memory of a device, and pipes between them.
#pragma once

#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/std.h"
#include "tests/until.h"
#include "transport/base/child.h"
#include "transport/worker.h"

namespace baton {

using gpudirect::CleanFake;
using gpudirect::InstalledFake;

inline constexpr size_t kSharedBytes = 1 << 20;

// A worker with a block of a device.
class End {
 public:
  using Settings = std::vector<std::pair<std::string, std::string>>;
  End(InstalledFake& installed, const char* provider, const Settings& more = {})
      : installed_(installed) {
    WorkerOptions options;
    options.providers = {provider};
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    options.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
    options.settings.insert(options.settings.end(), more.begin(), more.end());
    worker = *Worker::create(std::move(options));
  }
  // By virtual memory management.
  void make(int device = 0, size_t bytes = kSharedBytes) {
    buffer = *internal::device_memory()->allocate(device, bytes);
    region = *worker->register_memory(buffer->data(), bytes);
  }
  // As cudaMalloc does.
  void make_by_malloc(int device = 0) {
    malloced = installed_.fake().allocate(kSharedBytes, device);
    region = *worker->register_memory(address(), kSharedBytes);
  }
  void give_back() {
    const absl::Status status = worker->deregister_memory(region);
    EXPECT_TRUE(status.ok()) << status;
    free();
  }
  void free() {
    buffer.reset();
    if (malloced != 0) installed_.fake().free(std::exchange(malloced, 0));
  }
  void* address() const {
    return malloced != 0 ? gpudirect::pointer_of<void>(malloced) : buffer->data();
  }
  std::byte* view() const {
    return installed_.fake().view(reinterpret_cast<uintptr_t>(address()), kSharedBytes);
  }
  std::string offer() const { return worker->remote_region(region)->encode() + worker->address(); }
  template <typename Fact>
  void until(const Fact& fact, CallSite from = CallSite::here()) const {
    baton::until(
        fact, [&] { worker->progress(); }, [&] { return state_of(*worker, peer, "here"); }, from);
  }
  // Until what is staged goes from ring to device, with the peer of the last exchange; false: it
  // is gone.
  bool lent() const {
    bool there = false;
    until([&] {
      const std::string text = worker->explain(peer);
      there = text.find("by the peer straight from ours") != std::string::npos &&
              text.find("straight from the peer's ring") != std::string::npos;
      return there || worker->peer_state(peer) == PeerState::kDown;
    });
    return there;
  }
  // All of it, with the peer of the last time.
  absl::StatusOr<TransferId> submit(Op op, const std::string& offered) const {
    const auto remote =
        RemoteRegion::decode(std::string_view(offered).substr(0, RemoteRegion::kEncodedBytes));
    return worker->submit({.op = op,
                           .peer = peer,
                           .local = region,
                           .local_layout = Layout::contiguous(0, kSharedBytes),
                           .remote = *remote,
                           .remote_layout = Layout::contiguous(0, kSharedBytes)});
  }
  // Writes all there, and reads it back; false: that did not work.
  bool exchange(const std::string& offered, Worker* owner = nullptr) const {
    peer = *worker->connect(offered.substr(RemoteRegion::kEncodedBytes));
    return exchange_again(offered, owner);
  }
  // With the peer of the last time.
  bool exchange_again(const std::string& offered, Worker* owner = nullptr) const {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      const auto id = submit(op, offered);
      if (!id.ok()) return false;
      until([&] {
        if (owner != nullptr) owner->progress();
        return ended(*worker->state(*id));
      });
      const absl::Status status = worker->status(*id);
      EXPECT_TRUE(worker->release(*id).ok());
      if (!status.ok()) return false;
    }
    return true;
  }

  std::unique_ptr<internal::DeviceBuffer> buffer;
  std::unique_ptr<Worker> worker;  // ends before its memory
  gpudirect::DevicePointer malloced = 0;
  mutable PeerId peer;  // of the last exchange
  MemoryRegion region;

 private:
  InstalledFake& installed_;
};

// Two workers of this process over shm that have met, each with memory of the device.
struct MappedPair {
  explicit MappedPair(InstalledFake& fake, const End::Settings& more = {},
                      size_t bytes = kSharedBytes)
      : a(fake, "shm", more), b(fake, "shm") {
    for (End* end : {&a, &b}) end->make(0, bytes);
    a.peer = *a.worker->connect(b.worker->address());
    until([&] { return a.worker->peer_state(a.peer) == PeerState::kUp; });
  }
  void turn() const {
    a.worker->progress();
    if (b.worker != nullptr) b.worker->progress();
  }
  void until(const std::function<bool()>& fact, CallSite from = CallSite::here()) const {
    baton::until(
        fact, [&] { turn(); }, [&] { return state_of(a.worker->stats(), "a"); }, from);
  }
  TransferRequest request(Op op, const Layout& near, const Layout& far) const {
    return {.op = op,
            .peer = a.peer,
            .local = a.region,
            .local_layout = near,
            .remote = *b.worker->remote_region(b.region),
            .remote_layout = far};
  }
  absl::Status finish(TransferId id) const {
    until([&] { return ended(*a.worker->state(id)); });
    absl::Status status = a.worker->status(id);
    EXPECT_TRUE(a.worker->release(id).ok());
    return status;
  }
  absl::Status run(const TransferRequest& request) const {
    const auto id = a.worker->submit(request);
    return id.ok() ? finish(*id) : id.status();
  }
  End a, b;
};

// The host's memory moves from one worker of this process to the other.
inline void expect_host_moves(Worker& a, Worker& b) {
  std::vector<std::byte> from(300'000, std::byte{3}), to(300'000);
  const auto near = a.register_memory(from.data(), from.size());
  const auto far = b.register_memory(to.data(), to.size());
  ASSERT_TRUE(near.ok() && far.ok()) << near.status() << far.status();
  const auto id = a.submit({.peer = *a.connect(b.address()),
                            .local = *near,
                            .local_layout = Layout::contiguous(0, from.size()),
                            .remote = *b.remote_region(*far),
                            .remote_layout = Layout::contiguous(0, from.size())});
  ASSERT_TRUE(id.ok()) << id.status();
  until([&] { return ended(*a.state(*id)); }, [&] { a.progress(), b.progress(); },
        [&] { return state_of(a.stats(), "a") + state_of(b.stats(), "b"); });
  EXPECT_TRUE(a.status(*id).ok()) << a.status(*id);
  EXPECT_TRUE(from == to);
}

struct Pipe {
  Pipe() { EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0); }
  ~Pipe() {
    for (const int end : ends) close(end);
  }
  void say(const std::string& words) const {
    EXPECT_EQ(write(ends[1], words.data(), words.size()), static_cast<ssize_t>(words.size()));
  }
  // Nothing: whoever would have said it is gone.
  std::string hear() const {
    char words[4096];
    const ssize_t size = read(ends[0], words, sizeof words);
    return {words, size > 0 ? static_cast<size_t>(size) : 0};
  }
  void close_end(int which) {
    close(ends[which]);
    ends[which] = open("/dev/null", O_RDWR | O_CLOEXEC);
  }
  int ends[2] = {-1, -1};
};

// A process of its own, and pipes to it and from it. It ends with 0 if nothing has failed there.
class Child {
 public:
  explicit Child(const std::function<void(const Pipe& down, const Pipe& up)>& work) {
    id_ = base::fork_child();
    if (id_ == 0) {
      down.close_end(1);
      up.close_end(0);
      work(down, up);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    up.close_end(1);
    down.close_end(0);
  }
  ~Child() {
    if (id_ > 0) {
      EXPECT_EQ(end(), 0);
    }
  }
  // How it ended.
  int end() {
    int how = -1;
    waitpid(std::exchange(id_, 0), &how, 0);
    return how;
  }
  pid_t id() const { return id_; }

  Pipe down, up;

 private:
  pid_t id_ = -1;
};

// Until the child has said so, with rounds of progress meanwhile.
inline void await(const Child& child, const End& here, const std::string& words) {
  fcntl(child.up.ends[0], F_SETFL, O_NONBLOCK);
  here.until([&] { return child.up.hear() == words; });
}

// What a child does: it offers memory that `make` makes until it hears a word, and takes it back.
inline void offer(const Pipe& down, const Pipe& up, const std::function<void(End&)>& make,
                  gpudirect::FakeOptions options = {}) {
  CleanFake fake(std::move(options));
  End end(fake, "shm");
  make(end);
  up.say(end.offer());
  fcntl(down.ends[0], F_SETFL, O_NONBLOCK);
  while (down.hear().empty() && getppid() != 1) end.worker->progress();
  end.give_back();
  up.say("freed");
}

// And that child has taken its memory back.
inline void take_back(const Child& child, const End& here) {
  child.down.say("take it back");
  await(child, here, "freed");
}

}  // namespace baton
