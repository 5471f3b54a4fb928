// Two connected nodes, and transfers between them, for tests.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/transport/provider_node.h"
#include "transport/settings.h"

namespace baton::tcp {

// One side of a tcp connection for tests.

class TcpNode : public ProviderNode {
 public:
  explicit TcpNode(const std::string& name, Settings settings = {},
                   const std::string& secret = "0123456789abcdef", uint16_t port = 0,
                   const Clock& clock = Clock::steady())
      : ProviderNode("tcp", name, std::move(settings), secret, port, clock) {}

  RemoteRegion share(std::vector<char>& memory, Access access = Access::kRemoteReadWrite) {
    auto entry =
        regions.add(reinterpret_cast<std::byte*>(memory.data()), memory.size(), access, {});
    return regions.describe(**entry);
  }

  TransferDescriptor& transfer(Op op, std::vector<char>& local, Layout local_layout,
                               const RemoteRegion& remote, Layout remote_layout) {
    return ProviderNode::transfer(op, local.data(), local_layout, remote, remote_layout);
  }
};

// Bytes that differ from their neighbours and between seeds.
inline std::vector<char> pattern(size_t bytes, uint64_t seed) {
  std::vector<char> out(bytes);
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + 1;
  for (char& c : out) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    c = static_cast<char>(x >> 56);
  }
  return out;
}

// Hands the slices of one transfer to a node's rails, in turn, as fast as they are taken.
class Feeder {
 public:
  Feeder(TcpNode& node, TransferDescriptor& transfer, size_t slice_bytes)
      : node_(node), transfer_(transfer), slice_(slice_bytes) {}
  uint32_t slices() const {
    return transfer_.bytes == 0 ? 1 : static_cast<uint32_t>((transfer_.bytes - 1) / slice_ + 1);
  }
  uint32_t posted() const { return next_; }
  void feed() {
    for (bool any = true; any;) {
      any = false;
      for (size_t i = 0; i < node_.rails.size() && next_ < slices(); ++i) {
        const Slice slice{&transfer_, next_, next_ * slice_,
                          std::min(transfer_.bytes, (next_ + 1) * slice_)};
        if (!node_.rails[i]->post(slice, node_)) continue;
        ++next_;
        any = true;
      }
    }
  }
  // Reports of this transfer.
  size_t reports() const {
    return static_cast<size_t>(
        std::count_if(node_.done.begin(), node_.done.end(),
                      [&](const TcpNode::Done& d) { return d.transfer == transfer_.id; }));
  }
  bool finished() const { return next_ == slices() && reports() == next_; }
  // The first error that was reported, or OK.
  absl::Status result() const {
    for (const TcpNode::Done& d : node_.done) {
      if (d.transfer == transfer_.id && !d.status.ok()) return d.status;
    }
    return absl::OkStatus();
  }

 private:
  TcpNode& node_;
  TransferDescriptor& transfer_;
  size_t slice_;
  uint32_t next_ = 0;
};

class TcpPair : public ::testing::Test {
 protected:
  TcpNode::Settings settings(const std::string& sockets = "1") const {
    return {{"tcp.sockets", sockets}};
  }
  // Socket buffers so small that frames are always caught half way.
  TcpNode::Settings narrow(const std::string& sockets = "1") const {
    TcpNode::Settings out = settings(sockets);
    out.emplace_back("tcp.buffer_kib", "64");
    return out;
  }
  void connect(TcpNode& from, TcpNode& to) {
    auto address = must(to.provider->listen());
    from.provider->connect({.session = 7, .address = address});
    const auto sockets =
        static_cast<size_t>(std::stoi(std::string(setting(from.context, "tcp.sockets", "1"))));
    until({&from, &to}, [&] { return from.rails.size() == sockets && to.rails.size() == sockets; });
  }
  static absl::Status run(TcpNode& a, TcpNode& b, TransferDescriptor& t, size_t slice_bytes) {
    Feeder feeder(a, t, slice_bytes);
    until({&a, &b}, [&] {
      feeder.feed();
      return feeder.finished();
    });
    return feeder.result();
  }
};

}  // namespace baton::tcp
