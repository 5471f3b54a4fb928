// One side of a shm connection for tests, and memory for it.
#pragma once

#include "tests/std.h"
#include "tests/transport/provider_node.h"

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

class ShmNode : public ProviderNode {
 public:
  explicit ShmNode(const std::string& name, Settings settings = {},
                   const std::string& secret = "0123456789abcdef",
                   const Clock& clock = Clock::steady())
      : ProviderNode("shm", name, std::move(settings), secret, 0, clock) {}
  ~ShmNode() override {
    while (!rails.empty()) rails.back()->close(absl::CancelledError("the test is over"), *this);
    rails.clear();
    closed_rails.clear();
  }

  RegionEntry* add(const TestMemory& memory, Access access = Access::kRemoteReadWrite) {
    auto entry = regions.add(memory.data, memory.size, access, {memory.fd, 0});
    added = provider->add_region(**entry);
    return *entry;
  }
  // As the worker does it.
  absl::Status remove(RegionEntry* entry) {
    const RegionEntry copy = *entry;
    (void)regions.remove({entry->base, entry->size, entry->index, entry->generation});
    absl::Status fenced = provider->remove_region(copy, *this);
    closed_rails.clear();
    return fenced;
  }
  RemoteRegion share(const TestMemory& memory, Access access = Access::kRemoteReadWrite) {
    return regions.describe(*add(memory, access));
  }

  TransferDescriptor& transfer(Op op, const TestMemory& local, Layout local_layout,
                               const RemoteRegion& remote, Layout remote_layout) {
    return ProviderNode::transfer(op, local.data, local_layout, remote, remote_layout);
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

  absl::Status added;
  std::vector<std::unique_ptr<std::string>> texts;
};

// Connects `client` to `server`, both in this process.
inline void connect_nodes(ShmNode& client, ShmNode& server, CallSite from = CallSite::here()) {
  const auto address = server.provider->listen();
  ASSERT_TRUE(address.ok()) << address.status();
  client.provider->connect({.session = 1, .address = *address, .expected = server.self});
  until(
      {&client, &server}, [&] { return !client.rails.empty() && !server.rails.empty(); }, from);
}

}  // namespace baton::shm
