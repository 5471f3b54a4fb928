// A pair of workers that have lent each other their rings, and a third one beside them.
#pragma once

#include <string>
#include <string_view>

#include "tests/gpudirect/staged_pair.h"
#include "transport/worker.h"

namespace baton {

// What explain() says of lent rings, and then how many bytes.
inline constexpr const char* kByPeer = "by the peer straight from ours: ";
inline constexpr const char* kFromPeer = "copied straight from the peer's ring: ";

class Lent : public StagedPair {
 protected:
  // Until each has the other's ring.
  void lend(gpudirect::FakeOptions options = {}) {
    start("shm", std::move(options));
    b_.peer = b_.worker->next_peer_event()->peer;
    // One way for writes, the other way for reads.
    ASSERT_TRUE(run(request(Op::kWrite, true, true)).ok());
    ASSERT_TRUE(run(request(Op::kRead, true, true)).ok());
    until([&] {
      const std::string text = a_.worker->explain(a_.peer);
      return text.find(kByPeer) != std::string::npos && text.find(kFromPeer) != std::string::npos;
    });
  }
  // What the side's explain() says of these; 0: nothing. What went before both rings were there may
  // be a part of it.
  static size_t bytes_of(Side& side, const char* what) {
    const std::string text = side.worker->explain(side.peer);
    const size_t at = text.find(what);
    return at == std::string::npos ? 0
                                   : std::stoull(text.substr(at + std::string_view(what).size()));
  }
  std::string pattern(char first, size_t bytes = 600'000) const {
    std::string out(bytes, first);
    for (size_t i = 0; i < bytes; i += 1000) out[i] = static_cast<char>(first + i / 1000 % 50);
    return out;
  }
};

}  // namespace baton
