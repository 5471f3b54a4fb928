// One side of a shm connection for tests: a provider with its tables, memory, and a recording sink.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/provider.h"

namespace baton::shm {

// Memory to transfer to and from, from a sealed memfd (as pools make it) or from the heap.
class TestMemory {
 public:
  TestMemory(size_t bytes, bool with_file) : size(bytes) {
    if (with_file) {
      fd = memfd_create("baton-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return;
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    }
    const int flags = with_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    data = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0));
  }
  TestMemory(const TestMemory&) = delete;
  TestMemory& operator=(const TestMemory&) = delete;
  ~TestMemory() {
    munmap(data, size);
    if (fd >= 0) close(fd);
  }
  void fill(int value) { std::memset(data, value, size); }
  bool all(int value, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (data[i] != static_cast<std::byte>(value)) return false;
    }
    return true;
  }
  bool all(int value) const { return all(value, 0, size); }

  std::byte* data = nullptr;
  size_t size = 0;
  int fd = -1;
};

class ShmNode : public EventSink {
 public:
  using Settings = std::vector<std::pair<std::string, std::string>>;

  explicit ShmNode(const std::string& name, Settings settings = {},
                   const std::string& secret = "0123456789abcdef")
      : key(*ClusterKey::from_bytes(secret)),
        self{.uid = WorkerUid::random(), .name = name},
        regions(self.uid),
        counters(*CounterTable::create(self.uid)),
        context{.clock = Clock::steady(),
                .key = key,
                .self = self,
                .host_id = "here",
                .regions = regions,
                .counters = counters,
                .settings = std::move(settings)} {
    for (const auto& [registered, factory] : registered_providers()) {
      if (registered == "shm") provider = factory(context);
    }
  }
  ~ShmNode() override {
    for (auto& mine : rails) mine->close(absl::CancelledError("the test is over"), *this);
    rails.clear();
    graveyard.clear();
  }

  struct Done {
    TransferId transfer;
    uint32_t slice;
    absl::Status status;
  };
  struct Landed {
    Arrival arrival;
    std::string notify;
  };

  void slice_done(Rail&, TransferId transfer, uint32_t slice, absl::Status status) override {
    done.push_back({transfer, slice, std::move(status)});
  }
  void arrived(Rail&, const Arrival& arrival) override {
    landed.push_back({arrival, std::string(arrival.notify)});
    landed.back().arrival.notify = {};
  }
  void notified(Rail&, std::string_view payload) override { notes.emplace_back(payload); }
  void connected(uint64_t, const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    peer = info;
    rails.push_back(std::move(rail));
  }
  void connect_failed(uint64_t, absl::Status why) override { failed = std::move(why); }
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    peer = info;
    rails.push_back(std::move(rail));
  }
  void rail_down(Rail& rail, absl::Status why) override {
    down.push_back(std::move(why));
    for (auto& mine : rails) {
      if (mine.get() == &rail) graveyard.push_back(std::move(mine));
    }
    std::erase(rails, nullptr);
  }
  void resolved(uint64_t, absl::StatusOr<std::string>) override {}

  bool progress() {
    const bool any = provider->progress(*this);
    graveyard.clear();
    return any;
  }

  RegionEntry* add(const TestMemory& memory, Access access = Access::kRemoteReadWrite) {
    auto entry = regions.add(memory.data, memory.size, access, {memory.fd, 0});
    added = provider->add_region(**entry);
    return *entry;
  }
  // As the worker does it.
  void remove(RegionEntry* entry) {
    const RegionEntry copy = *entry;
    (void)regions.remove({entry->base, entry->size, entry->index, entry->generation});
    provider->remove_region(copy, *this);
    graveyard.clear();
  }
  RemoteRegion share(const TestMemory& memory, Access access = Access::kRemoteReadWrite) {
    return regions.describe(*add(memory, access));
  }

  // A transfer of ours; lives as long as the node.
  TransferDescriptor& transfer(Op op, const TestMemory& local, Layout local_layout,
                               const RemoteRegion& remote, Layout remote_layout) {
    auto t = std::make_unique<TransferDescriptor>();
    t->id = {next_slot++, 1};
    t->op = op;
    t->local_base = local.data;
    t->local = local_layout;
    t->remote = remote;
    t->remote_layout = remote_layout;
    t->bytes = local_layout.bytes();
    transfers.push_back(std::move(t));
    return *transfers.back();
  }
  TransferDescriptor& message(const std::string& text) {
    auto t = std::make_unique<TransferDescriptor>();
    t->id = {next_slot++, 1};
    texts.push_back(std::make_unique<std::string>(text));
    t->notify = *texts.back();
    transfers.push_back(std::move(t));
    return *transfers.back();
  }
  bool post(const TransferDescriptor& t) { return rails.at(0)->post({&t, 0, 0, t.bytes}, *this); }

  ClusterKey key;
  HelloInfo self;
  RegionTable regions;
  CounterTable counters;
  ProviderContext context;
  std::unique_ptr<Provider> provider;

  std::vector<std::unique_ptr<Rail>> rails;
  std::vector<std::unique_ptr<Rail>> graveyard;
  std::vector<Done> done;
  std::vector<Landed> landed;
  std::vector<std::string> notes;
  std::vector<absl::Status> down;
  HelloInfo peer;
  absl::Status failed;
  absl::Status added;
  std::vector<std::unique_ptr<TransferDescriptor>> transfers;
  std::vector<std::unique_ptr<std::string>> texts;
  uint32_t next_slot = 0;
};

// Runs the nodes until `ready`, sleeping on their descriptors between rounds. False after
// `seconds` without it: only a broken provider comes to that.
inline bool run_until(const std::vector<ShmNode*>& nodes, const std::function<bool()>& ready,
                      double seconds = 60) {
  const Time end = Clock::steady().now() +
                   std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds));
  while (!ready()) {
    bool any = false;
    for (ShmNode* node : nodes) any |= node->progress();
    if (any) continue;
    const Time now = Clock::steady().now();
    if (now >= end) return false;
    bool armed = true;
    Time next = end;
    std::vector<pollfd> fds;
    for (ShmNode* node : nodes) {
      armed &= node->provider->arm();
      next = std::min(next, node->provider->next_timer());
      fds.push_back({node->provider->wait_fd(), POLLIN, 0});
    }
    const auto wait =
        std::chrono::ceil<std::chrono::milliseconds>(std::max(next - now, Time::zero()));
    if (armed) ::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
  }
  return true;
}

// Connects `client` to `server`, both in this process.
inline bool connect_nodes(ShmNode& client, ShmNode& server) {
  const auto address = server.provider->listen();
  if (!address.ok()) return false;
  client.provider->connect({.session = 1, .address = *address, .expected = server.self});
  return run_until({&client, &server},
                   [&] { return !client.rails.empty() && !server.rails.empty(); });
}

}  // namespace baton::shm
