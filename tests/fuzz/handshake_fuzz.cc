// Fuzzes the handshake from both ends. The first byte picks the role under attack and how many
// honest messages it gets first; the rest is what the peer sends then. A peer without the key must
// never be taken for a friend, and a failed handshake must stay failed.

#include "tests/std.h"
#include "transport/net/handshake.h"

namespace {

using baton::ClusterKey;
using baton::HelloInfo;
using baton::net::Handshake;

const ClusterKey& key() {
  static const ClusterKey kKey = *ClusterKey::from_bytes("the key of the fuzzed cluster");
  return kKey;
}

HelloInfo info(const char* name) {
  HelloInfo info;
  info.name = name;
  return info;
}

// Feeds `to` what it waits for from the front of `bytes`; false when there is too little or it
// fails.
bool feed(Handshake& to, std::string_view& bytes) {
  const size_t wanted = to.wanted();
  if (wanted == 0 || wanted > bytes.size()) return false;
  const absl::Status status = to.receive(bytes.substr(0, wanted));
  bytes.remove_prefix(wanted);
  if (!status.ok() && (status.message().empty() || to.done() || to.wanted() != 0)) std::abort();
  return status.ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto role = data[0] & 1 ? Handshake::Role::kServer : Handshake::Role::kClient;
  const auto other = data[0] & 1 ? Handshake::Role::kClient : Handshake::Role::kServer;
  const int honest_messages = (data[0] >> 1) % 5;
  std::string_view attack(reinterpret_cast<const char*>(data) + 1, size - 1);
  Handshake victim(role, key(), info("victim"));
  Handshake friendly(other, key(), info("friend"));
  std::string to_victim;
  for (int message = 0; message < honest_messages; ++message) {
    std::string to_friend(victim.to_send());
    victim.sent(to_friend.size());
    for (std::string_view bytes = to_friend; feed(friendly, bytes);) {
    }
    to_victim.append(friendly.to_send());
    friendly.sent(friendly.to_send().size());
    std::string_view bytes = to_victim;
    if (!feed(victim, bytes)) break;
    to_victim.erase(0, to_victim.size() - bytes.size());
  }
  while (feed(victim, attack)) {
  }
  if (victim.done()) std::abort();  // its last message is never an honest one
  return 0;
}
