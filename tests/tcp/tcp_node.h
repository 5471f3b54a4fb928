// One side of a tcp connection for tests.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/transport/provider_node.h"

namespace baton::tcp {

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

}  // namespace baton::tcp
